from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.generation import Placed
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState, WorkerLoad
from services.router.policy import least_load, round_robin
from services.router.view import ClusterView, Instance, blocks_for


def instance(name: str, kind: ServiceKind = ServiceKind.DECODE_WORKER, **load: int) -> Instance:
    presence = Presence(kind=kind, name=name, incarnation=name, state=ServiceState.READY)
    return Instance(presence, WorkerLoad(**{"num_blocks": 100, "block_size": 16, **load}))


def test_round_robin_gives_each_its_turn() -> None:
    instances = [instance(name) for name in "abc"]
    assert [round_robin(instances, turn).incarnation for turn in range(5)] == list("abcab")


def test_least_load_looks_at_queued_tokens_then_sequences_then_free_blocks() -> None:
    prefill = ServiceKind.PREFILL_WORKER
    assert (
        least_load([instance("a", prefill, num_waiting_tokens=9), instance("b", prefill)], 0).incarnation
        == "b"
    )
    assert (
        least_load(
            [instance("a", num_running=2), instance("b", num_running=1, num_reserved=2)], 0
        ).incarnation
        == "a"
    )
    assert (
        least_load([instance("a", num_used_blocks=9), instance("b", num_used_blocks=8)], 0).incarnation == "b"
    )


def test_what_waits_elsewhere_for_a_decode_worker_is_not_its_queue() -> None:
    busy, placed = instance("busy", num_running=3), instance("placed", num_running=1)
    placed.pending["r"] = 5000
    assert least_load([busy, placed], 0).incarnation == "placed"


@given(st.integers(2, 5), st.integers(1, 60))
def test_equal_instances_get_equal_shares_without_any_report_between(
    num_instances: int, num_requests: int
) -> None:
    instances = [instance(str(n)) for n in range(num_instances)]
    chosen: Counter[str] = Counter()
    for turn in range(num_requests):
        one = least_load(instances, turn)
        one.pending[str(turn)] = 16
        chosen[one.incarnation] += 1
    assert max(chosen.values()) - min(chosen[str(n)] for n in range(num_instances)) <= 1


@given(st.integers(0, 300), st.integers(1, 64))
def test_blocks_for_a_prompt_hold_it_and_one_token_more_and_none_too_many(
    num_tokens: int, block_size: int
) -> None:
    blocks = blocks_for(num_tokens, block_size)
    assert (blocks - 1) * block_size <= num_tokens < blocks * block_size


def view_with(*names: str) -> ClusterView:
    view = ClusterView(stale_after_seconds=3, placement_seconds=5, max_placements=3)
    view.set_members([instance(name).presence for name in names])
    return view


def report(name: str, sequence: int, **load: int) -> LoadReport:
    return LoadReport(
        kind=ServiceKind.DECODE_WORKER,
        incarnation=name,
        sequence=sequence,
        load=WorkerLoad(num_blocks=9, **load),
    )


def test_an_older_report_and_one_of_a_stranger_change_nothing() -> None:
    view = view_with("a")
    view.hear(report("a", 2, num_running=2), 1.0)
    view.hear(report("a", 1, num_running=1), 2.0)
    view.hear(report("stranger", 1), 2.0)
    [known] = view.ready(ServiceKind.DECODE_WORKER, 2.0)
    assert (known.num_sequences, known.heard_at) == (2, 1.0)


def test_a_worker_is_used_from_its_first_report_until_it_is_silent_draining_or_gone() -> None:
    view = view_with("a")
    kind = ServiceKind.DECODE_WORKER
    assert view.ready(kind, 0.0) == []
    view.hear(report("a", 1), 1.0)
    assert len(view.ready(kind, 3.9)) == 1
    assert view.next_change(1.0) == 4.0
    assert view.ready(kind, 4.0) == []
    draining = Presence(kind=kind, name="a", incarnation="a", state=ServiceState.DRAINING)
    view.set_members([draining])
    assert view.ready(kind, 1.0) == []
    view.set_members([])
    assert view.next_change(1.0) == float("inf")


def test_placements_are_bounded_and_the_oldest_goes_first() -> None:
    view = view_with("a")
    view.hear(report("a", 1), 0.0)
    for number in range(5):
        view.place(str(number), Placed(prefill="", decode="a"), 1, float(number))
    [known] = view.ready(ServiceKind.DECODE_WORKER, 0.0)
    assert list(known.pending) == ["2", "3", "4"]
    assert view.num_placements() == 3
    assert not view.withdraw("0")
    assert view.withdraw("4")
    view.forget_old_placements(7.0)
    assert list(known.pending) == ["3"]
