"""The control loop against a mesh that does what it says, under loads that wander."""

from dataclasses import replace

import pytest
from balancing_plant import MOVE_ROUNDS, NUM_BLOCKS, ROUND_SECONDS, Plant
from hypothesis import example, given, settings
from hypothesis import strategies as st

from libs.balancing.decide import CALM_ROUNDS
from libs.balancing.device_model import predict_inbound, predict_outbound
from libs.balancing.scoring import CALM_UTILIZATION
from libs.balancing.settings import BalancingSettings
from libs.balancing.state import COOLDOWN_SECONDS, LoopState
from libs.balancing.view import Decision, Flip, Inbound, MeshView, Outbound
from libs.placement.module import ModuleKind
from libs.placement.placement import check_module
from libs.placement.role import Role

pytestmark = pytest.mark.timeout(60)  # walks of hundreds of rounds, many times

TASTE = BalancingSettings(max_moves=2)
FLIPPING = BalancingSettings(flips_roles=True)

WORKERS = st.integers(0, 3)
WALKS = st.lists(
    st.tuples(WORKERS, st.floats(0.0, 1.6), st.floats(0.0, 1.2), st.integers(4, 80)), min_size=1, max_size=6
)


def walk(plant: Plant, steps: list[tuple[int, float, float, int]]) -> None:
    """Each step gives one instance another demand, and lasts so many rounds."""
    for number, work, memory, num_rounds in steps:
        workers = list(plant.devices)
        demand = plant.demands[workers[number % len(workers)]]
        demand.work, demand.memory = work, memory
        plant.run(num_rounds)


def check_decision(plant: Plant, view: MeshView, state: LoopState, decision: Decision) -> None:
    devices = state.devices
    loads = {worker: one.load.utilization for worker, one in state.devices.items()}
    before = max(loads.values())
    moving = {worker for one in view.under_way for worker in (one.instance, one.host)}
    assert len(view.under_way) < plant.settings.max_moves
    if isinstance(decision, Flip):
        num_left = sum(one.role is devices[decision.worker].role for one in view.devices) - 1
        assert num_left >= 1
        return
    assert isinstance(decision, Outbound | Inbound)
    assert not {decision.instance, decision.host} & moving
    home, host = devices[decision.instance], devices[decision.host]
    if isinstance(decision, Outbound):
        check_module(home.placement, decision.module)
        predicted = predict_outbound(decision, home, host)
        allowed = before
    else:
        age = plant.now - plant.switched_at[decision.move_id]
        assert age >= COOLDOWN_SECONDS, "undone within its cooldown"
        predicted = predict_inbound(decision, home, host)
        allowed = max(before, CALM_UTILIZATION)
    loads[home.worker] = predicted.owner.utilization
    loads[host.worker] = predicted.host.utilization
    assert max(loads.values()) <= allowed + 1e-9
    assert predicted.num_blocks >= home.num_used_blocks


@given(WALKS, st.integers(0, 1000))
def test_whatever_the_load_a_move_keeps_its_promises(steps, seed):
    walk(Plant(TASTE, seed, noise=0.1, on_decision=check_decision), steps)


@settings(max_examples=8)
@given(WALKS, st.integers(0, 1000))
def test_flips_leave_at_least_one_worker_of_each_role(steps, seed):
    plant = Plant(FLIPPING, seed, noise=0.05, num_prefill=3, num_decode=2, on_decision=check_decision)
    walk(plant, steps)
    assert {one.role for one in plant.devices.values()} == {Role.PREFILL, Role.DECODE}


@settings(max_examples=5)
@given(WALKS, st.integers(0, 1000))
@example([(1, 0.5, 1.125, 55), (0, 1.0, 0.0, 4)], 0)  # two homes at one host, of which one works more
def test_a_load_that_stays_the_same_settles(steps, seed):
    plant = Plant(TASTE, seed, noise=0.03)
    walk(plant, steps)
    plant.run(400)
    num_decisions = len(plant.decisions)
    plant.run(300)
    assert len(plant.decisions) == num_decisions


@settings(max_examples=5)
@given(WALKS, st.integers(0, 1000))
@example([(0, 0.5, 1.0, 4)], 125)  # layers that went with their weights go again without them
def test_under_a_load_that_stays_the_same_nothing_goes_back_and_forth(steps, seed):
    plant = Plant(BalancingSettings(), seed, noise=0.03)
    for number, work, memory, _ in steps:
        plant.demands[list(plant.devices)[number]].work = work
        plant.demands[list(plant.devices)[number]].memory = memory
    plant.run(600)
    moves = [one for _, one in plant.decisions if isinstance(one, Outbound)]
    away = [(one.instance, one.host, one.module, one.with_weights) for one in moves]
    assert len(away) == len(set(away)), "gone, come home, and gone again"


def test_a_busy_prefill_worker_hands_layers_to_an_idle_decode_worker():
    plant = Plant()
    plant.demands["prefill-0"].work = plant.demands["prefill-1"].work = 1.4
    plant.run(200)
    first = plant.decisions[0][1]
    assert isinstance(first, Outbound)
    assert first.module.kind is ModuleKind.LAYERS
    assert first.instance.startswith("prefill")
    assert first.host.startswith("decode")
    assert plant.rounds[-1].gap < plant.settings.delta_hi
    peak = max(one.utilization for one in plant.rounds[-1].devices)
    assert peak < 0.85 * max(one.utilization for one in plant.rounds[4].devices)


def test_a_full_decode_pool_grows_by_what_an_idle_prefill_worker_takes():
    plant = Plant(BalancingSettings(moves_layers=False))
    plant.demands["decode-2"].memory = 1.5
    before = plant.devices["decode-2"].num_blocks
    plant.run(200)
    first = plant.decisions[0][1]
    assert isinstance(first, Outbound)
    assert first.module.kind is ModuleKind.HEADS
    assert plant.devices["decode-2"].num_blocks >= 1.3 * before


def test_a_full_decode_pool_grows_by_heads_also_where_the_worker_is_busy():
    plant = Plant(BalancingSettings(moves_layers=False))
    plant.demands["decode-2"].work, plant.demands["decode-2"].memory = 1.3, 1.5
    before = plant.devices["decode-2"].num_blocks
    plant.run(200)
    assert plant.devices["decode-2"].num_blocks >= 1.3 * before


def kinds_away(plant: Plant) -> list[ModuleKind]:
    return [one.module.kind for _, one in plant.decisions if isinstance(one, Outbound)]


def long_prompts_then_long_answers(memory: float) -> Plant:
    """First prefill workers are short of compute, and decode workers host for them; then the reverse."""
    plant = Plant(noise=0.03)
    for worker, demand in plant.demands.items():
        demand.work, demand.memory = (1.5, 0.1) if worker.startswith("prefill") else (0.3, memory)
    plant.run(60)
    for worker, demand in plant.demands.items():
        demand.work = 0.2 if worker.startswith("prefill") else 1.5
    return plant


@pytest.mark.parametrize("memory", [0.2, 0.4, 0.5, 0.7])
def test_no_heads_leave_a_worker_that_is_short_of_compute_whatever_it_hosts(memory):
    plant = long_prompts_then_long_answers(memory)
    plant.run(210)
    peak = max(one.utilization for seen in plant.rounds for one in seen.devices)
    assert ModuleKind.HEADS not in kinds_away(plant)
    for worker in ("decode-2", "decode-3"):
        assert any(one.module.kind is ModuleKind.LAYERS for one in plant.devices[worker].placement.placed)
    assert max(one.utilization for one in plant.rounds[-1].devices) < peak - 0.1


def test_heads_leave_where_memory_is_short_and_compute_is_not():
    plant = Plant()
    plant.demands["decode-2"].work, plant.demands["decode-2"].memory = 0.1, 0.9
    plant.run(200)
    assert kinds_away(plant)[0] is ModuleKind.HEADS
    assert plant.devices["decode-2"].num_blocks >= 1.3 * NUM_BLOCKS


def test_layers_can_leave_where_heads_left_before():
    plant = Plant()
    plant.demands["decode-2"].work, plant.demands["decode-2"].memory = 0.1, 0.9
    plant.run(60)
    assert kinds_away(plant) == [ModuleKind.HEADS]
    plant.demands["decode-2"].work, plant.demands["decode-2"].memory = 1.8, 0.2
    plant.run(100)
    away = plant.devices["decode-2"].placement.placed
    assert sum(len(one.module.layers) for one in away if one.module.kind is ModuleKind.LAYERS) >= 10
    assert max(one.utilization for one in plant.rounds[-1].devices) < 0.6


def test_layers_leave_where_compute_is_as_short_as_memory_and_the_pool_grows_by_them():
    plant = Plant()
    for worker in ("decode-2", "decode-3"):
        plant.demands[worker].work, plant.demands[worker].memory = 1.3, 1.5
    plant.run(200)
    assert kinds_away(plant)[0] is ModuleKind.LAYERS
    assert all(plant.devices[worker].num_blocks >= 1.3 * NUM_BLOCKS for worker in ("decode-2", "decode-3"))


def test_memory_that_is_short_moves_modules_also_where_nothing_is_computed():
    plant = Plant()
    plant.demands["decode-2"].work, plant.demands["decode-2"].memory = 0.0, 1.0
    before = plant.devices["decode-2"].num_blocks
    plant.run(100)
    assert plant.decisions
    assert plant.devices["decode-2"].num_blocks > before


def test_what_was_moved_is_given_back_when_the_load_is_gone():
    plant = Plant()
    plant.demands["prefill-0"].work = 1.5
    plant.run(100)
    num_away = sum(len(one.placement.placed) for one in plant.devices.values())
    assert num_away
    plant.demands["prefill-0"].work = 0.05
    plant.run(60 + num_away * (CALM_ROUNDS + MOVE_ROUNDS + int(COOLDOWN_SECONDS / ROUND_SECONDS)))
    assert not any(one.placement.placed for one in plant.devices.values())
    returned = [one.move_id for _, one in plant.decisions if isinstance(one, Inbound)]
    assert returned == sorted(returned), "the oldest first"


def test_one_that_only_watches_says_what_it_would_do():
    plant = Plant(BalancingSettings(acts=False))
    plant.demands["prefill-0"].work = 1.5
    plant.run(40)
    assert not plant.decisions
    assert "only watches" in plant.rounds[-1].decision
    assert "from prefill-0" in plant.rounds[-1].decision


def test_a_round_tells_why_each_candidate_was_not_taken():
    plant = Plant(BalancingSettings(max_moves=1))
    plant.demands["prefill-0"].work = 1.5
    plant.run(40)
    told = next(one for one in plant.rounds if one.candidates)
    verdicts = [one.verdict for one in told.candidates]
    assert verdicts.count("taken") == 1
    assert verdicts[0] == "taken"
    assert all(verdicts)
    assert told.is_balancing
    later = plant.rounds[plant.rounds.index(told) + 1]
    assert later.decision == "stays: 1 of 1 moves are under way"


def test_on_whole_devices_it_is_said_that_layers_would_lower_no_peak():
    plant = Plant(TASTE)
    plant.devices = {name: replace(one, device_share=1.0) for name, one in plant.devices.items()}
    plant.demands["prefill-0"].work = 1.5
    plant.run(20)
    verdicts = {one.verdict for told in plant.rounds for one in told.candidates}
    assert verdicts == {"would not lower the peak"}


def test_between_the_thresholds_the_loop_goes_on_doing_what_it_did():
    plant = Plant(BalancingSettings(acts=False))
    plant.demands["prefill-0"].work = 0.35  # a gap of 0.15
    plant.run(60)
    assert not plant.rounds[-1].is_balancing
    plant.demands["prefill-0"].work = 0.9
    plant.run(60)
    assert plant.rounds[-1].is_balancing
    plant.demands["prefill-0"].work = 0.35
    plant.run(60)
    assert plant.rounds[-1].is_balancing
    plant.demands["prefill-0"].work = 0.05
    plant.run(60)
    assert not plant.rounds[-1].is_balancing
