"""The choices among candidates, and the prediction they rest on, held against libs.cost."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import FetchCost
from libs.cost.plan_fetch import plan_fetch
from libs.cost.prefill import PrefillCost, prefill_seconds
from libs.routing.candidates import Draw, PrefillCandidates, Prompt
from libs.routing.policies import NEAR_MOST_SECONDS, NEAR_SECONDS, NEAR_SHARE, POLICIES
from libs.routing.predicting import HitKind, predict

UNIT = st.floats(0, 1, exclude_max=True)
DRAWS = st.builds(Draw, turn=st.integers(0, 10**9), first=UNIT, second=UNIT)
COSTS = st.builds(
    PrefillCost,
    step_seconds=st.floats(0, 1e-2),
    token_seconds=st.floats(1e-6, 1e-2),
    pair_seconds=st.floats(0, 1e-6),
)
FETCHES = st.builds(
    FetchCost,
    latency_seconds=st.floats(0, 0.1),
    bytes_per_second=st.floats(1e5, 1e11),
    disk_bytes_per_second=st.one_of(st.just(0.0), st.floats(1e5, 1e11)),
)

PREFILL, FETCH = PrefillCost(1e-3, 1e-3, 0.0), FetchCost(1e-3, 1e9)


def candidates(
    queued: list[float],
    *,
    local: list[int] | None = None,
    prompts: list[int] | None = None,
    prefill: PrefillCost = PREFILL,
    fetch: FetchCost = FETCH,
) -> PrefillCandidates:
    def same(value: float) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.full(len(queued), value)

    return PrefillCandidates(
        queued_seconds=np.array(queued, dtype=np.float64),
        num_prompts=np.array(prompts or [0] * len(queued)),
        num_local_blocks=np.array(local or [0] * len(queued)),
        step_seconds=same(prefill.step_seconds),
        token_seconds=same(prefill.token_seconds),
        pair_seconds=same(prefill.pair_seconds),
        fetch_latency_seconds=same(fetch.latency_seconds),
        fetch_bytes_per_second=same(fetch.bytes_per_second),
        disk_bytes_per_second=same(fetch.disk_bytes_per_second),
    )


def prompt_of(num_tokens: int, num_held: int = 0, num_memory: int | None = None, **more: int) -> Prompt:
    """The stores have the first `num_held` blocks, those from `num_memory` on on disk alone."""
    positions = np.arange(num_held + 1)
    disk = np.maximum(positions - (num_held if num_memory is None else num_memory), 0)
    return Prompt(
        num_tokens,
        **{"block_bytes": 1 << 16, "num_layers": 4, **more},
        store_end=np.full(num_held + 1, num_held),
        disk_before=disk,
    )


def margin_of(least: float) -> float:
    return max(NEAR_SECONDS, min(NEAR_SHARE * least, NEAR_MOST_SECONDS))


QUEUES = st.lists(st.floats(0, 100), min_size=1, max_size=12)
DRAW = Draw(0, 0.0, 0.0)


@given(st.sampled_from(sorted(POLICIES)), QUEUES, DRAWS, st.data())
def test_every_policy_chooses_one_that_is_there_and_the_same_again(
    name: str, queued: list[float], draw: Draw, data: st.DataObject
) -> None:
    local = data.draw(st.lists(st.integers(0, 8), min_size=len(queued), max_size=len(queued)))
    state = candidates(queued, local=local)
    chosen = POLICIES[name](prompt_of(140, 8), state, draw)
    assert chosen in range(len(queued))
    assert type(chosen) is int
    assert POLICIES[name](prompt_of(140, 8), state, draw) == chosen


@given(QUEUES, DRAWS)
def test_least_load_is_near_the_least_whatever_is_cached(queued: list[float], draw: Draw) -> None:
    chosen = POLICIES["least_load"](
        prompt_of(140), candidates(queued, local=[8, *[0] * (len(queued) - 1)]), draw
    )
    assert queued[chosen] <= min(queued) + margin_of(min(queued))


@given(QUEUES, DRAWS)
def test_power_of_two_never_takes_the_one_with_most_work_where_there_is_another(
    queued: list[float], draw: Draw
) -> None:
    chosen = POLICIES["power_of_two"](prompt_of(140), candidates(queued), draw)
    assert queued[chosen] < max(queued) or queued.count(max(queued)) > 1 or len(queued) == 1


@given(QUEUES, DRAWS, st.data())
def test_prefix_affinity_takes_a_longest_prefix_however_loaded(
    queued: list[float], draw: Draw, data: st.DataObject
) -> None:
    local = data.draw(st.lists(st.integers(0, 8), min_size=len(queued), max_size=len(queued)))
    chosen = POLICIES["prefix_affinity"](prompt_of(140), candidates(queued, local=local), draw)
    assert local[chosen] == max(local)


@given(QUEUES, DRAWS, st.data(), COSTS, FETCHES)
def test_predicted_ttft_is_near_the_least_that_is_predicted(
    queued: list[float], draw: Draw, data: st.DataObject, prefill: PrefillCost, fetch: FetchCost
) -> None:
    local = data.draw(st.lists(st.integers(0, 8), min_size=len(queued), max_size=len(queued)))
    state = candidates(queued, local=local, prefill=prefill, fetch=fetch)
    prompt = prompt_of(140, data.draw(st.integers(0, 8)))
    seconds = predict(prompt, state).ttft_seconds
    chosen = POLICIES["predicted_ttft"](prompt, state, draw)
    assert seconds[chosen] <= seconds.min() + margin_of(float(seconds.min()))


def test_round_robin_gives_each_its_turn() -> None:
    turns = [
        POLICIES["round_robin"](prompt_of(9), candidates([0.0] * 3), Draw(t, 0.5, 0.5)) for t in range(5)
    ]
    assert turns == [0, 1, 2, 0, 1]


def test_random_and_power_of_two_reach_everybody() -> None:
    chance = np.random.default_rng(1)
    for name in ("random", "power_of_two", "least_load"):
        counts = Counter(
            POLICIES[name](prompt_of(9), candidates([0.0] * 5), Draw(0, *chance.random(2)))
            for _ in range(400)
        )
        assert set(counts) == set(range(5))


def test_of_equal_queues_the_one_with_fewest_prompts_is_taken() -> None:
    assert POLICIES["least_load"](prompt_of(9), candidates([0.0] * 3, prompts=[2, 1, 2]), DRAW) == 1


def test_of_equal_times_the_one_that_fetches_least_is_taken() -> None:
    free = candidates([0.0] * 3, local=[0, 8, 0], fetch=FetchCost(0.0, 1e12))
    for chance in (0.0, 0.4, 0.9):
        assert POLICIES["predicted_ttft"](prompt_of(140, 8), free, Draw(0, chance, chance)) == 1


@given(st.lists(st.integers(2, 5), min_size=2, max_size=2), st.integers(1, 80), st.randoms())
def test_routers_that_do_not_hear_of_each_other_still_spread_their_prompts(
    shape: list[int], num_prompts: int, chance: object
) -> None:
    """Each sees its own placements alone, as between two reports."""
    num_workers, num_routers = shape
    rng = np.random.default_rng(num_prompts)
    seen = np.zeros((num_routers, num_workers))
    for number in range(num_prompts):
        own = seen[number % num_routers]
        state = candidates(list(own * 0.01), prompts=[int(n) for n in own])
        own[POLICIES["predicted_ttft"](prompt_of(64), state, Draw(number, *rng.random(2)))] += 1
    total = seen.sum(axis=0)
    assert total.max() - total.min() <= 2 * num_routers


@given(
    num_tokens=st.integers(1, 6000),
    here=st.integers(0, 40),
    held=st.integers(0, 400),
    memory=st.integers(0, 400),
    prefill=COSTS,
    fetch=FETCHES,
)
def test_with_an_empty_queue_the_prediction_is_the_plan_a_worker_makes(
    num_tokens: int, here: int, held: int, memory: int, prefill: PrefillCost, fetch: FetchCost
) -> None:
    memory = max(min(memory, held), min(here, held))
    prompt = prompt_of(num_tokens, held, memory)
    found = predict(prompt, candidates([0.0], local=[here], prefill=prefill, fetch=fetch))
    plan = plan_fetch(
        num_tokens=num_tokens,
        num_here_blocks=here,
        num_held_blocks=held,
        block_size=16,
        block_bytes=1 << 16,
        num_layers=4,
        prefill=prefill,
        fetch=fetch,
        num_memory_blocks=memory,
    )
    ttft = float(found.ttft_seconds[0])
    assert ttft >= plan.seconds * (1 - 1e-9)
    assert ttft <= plan.seconds * 1.5 + 1e-9
    if plan.num_blocks == int(found.num_fetched_blocks[0]):
        assert ttft == pytest.approx(plan.seconds)


@given(num_tokens=st.integers(1, 6000), here=st.integers(0, 500), prefill=COSTS, queued=st.floats(0, 10))
def test_without_stores_a_prompt_waits_then_computes_what_is_not_here(
    num_tokens: int, here: int, prefill: PrefillCost, queued: float
) -> None:
    found = predict(prompt_of(num_tokens), candidates([queued], local=[here], prefill=prefill))
    cached = min(here, (num_tokens - 1) // 16) * 16
    own = prefill_seconds(prefill, num_tokens - cached, cached)
    assert found.own_seconds[0] == pytest.approx(own)
    assert found.ttft_seconds[0] == pytest.approx(queued + own)
    assert found.kind(0) is (HitKind.LOCAL if cached else HitKind.RECOMPUTE)


def test_a_queue_hides_a_fetch() -> None:
    slow = FetchCost(0.0, 64 * 65536)  # a second for the 64 blocks that are held
    prompt = prompt_of(1025, 64)
    cost = PrefillCost(0.0, 1e-3, 0.0)
    idle = predict(prompt, candidates([0.0], prefill=cost, fetch=slow))
    busy = predict(prompt, candidates([2.0], prefill=cost, fetch=slow))
    assert busy.ttft_seconds[0] == pytest.approx(2.0 + 1e-3)
    assert busy.num_fetched_blocks[0] == 64
    assert 0 < idle.num_fetched_blocks[0] < 64
    assert idle.kind(0) is HitKind.STORE


@given(st.integers(0, 300), st.integers(0, 40), st.floats(0, 5), FETCHES, COSTS)
def test_more_in_the_stores_is_never_slower(
    held: int, more: int, queued: float, fetch: FetchCost, prefill: PrefillCost
) -> None:
    state = candidates([queued], prefill=prefill, fetch=fetch)
    less = predict(prompt_of(5000, held), state).ttft_seconds[0]
    all_of_it = predict(prompt_of(5000, held + more), state).ttft_seconds[0]
    recomputed = predict(prompt_of(5000), state).ttft_seconds[0]
    assert all_of_it <= recomputed * (1 + 1e-9)
    assert all_of_it <= less * 1.5
