"""The cluster as a router hears it: rows, reports, placements."""

from collections import Counter
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.cost.prefill import PrefillCost
from services.router.room import free_blocks, num_requests, waiting_tokens
from services.router.view import ClusterView, Share

DECODE, PREFILL = ServiceKind.DECODE_WORKER, ServiceKind.PREFILL_WORKER


def presence(name: str, state: ServiceState = ServiceState.READY, kind: ServiceKind = DECODE) -> Presence:
    return Presence(kind=kind, name=name, incarnation=name, state=state)


def view_with(*names: str, max_placements: int = 3) -> ClusterView:
    view = ClusterView(stale_after_seconds=3, placement_seconds=5, max_placements=max_placements)
    view.set_members([presence(name) for name in names])
    return view


def report(name: str, sequence: int, **load: object) -> LoadReport:
    figures = WorkerLoad(**{"num_blocks": 9, "block_size": 16, **load})  # type: ignore[arg-type]  # kwargs of the tests
    return LoadReport(kind=DECODE, incarnation=name, sequence=sequence, load=figures)


def row_of(view: ClusterView, name: str) -> int:
    return view.instances.rows[name]


def test_an_older_report_and_one_of_a_stranger_change_nothing() -> None:
    view = view_with("a")
    view.hear(report("a", 2, num_running=2), 1.0)
    view.hear(report("a", 1, num_running=1), 2.0)
    view.hear(report("stranger", 1), 2.0)
    [row] = view.ready(DECODE, 2.0)
    assert num_requests(view.instances)[row] == 2
    assert view.instances.heard_at[row] == 1.0


def test_a_worker_is_used_from_its_first_report_until_it_is_silent_draining_or_gone() -> None:
    view = view_with("a")
    assert not len(view.ready(DECODE, 0.0))
    view.hear(report("a", 1), 1.0)
    assert len(view.ready(DECODE, 3.9)) == 1
    assert view.next_change(1.0) == 4.0
    assert not len(view.ready(DECODE, 4.0))
    view.set_members([presence("a", ServiceState.DRAINING)])
    assert not len(view.ready(DECODE, 1.0))
    view.set_members([])
    assert view.next_change(1.0) == float("inf")


def test_placements_are_bounded_and_the_oldest_goes_first() -> None:
    view = view_with("a")
    view.hear(report("a", 1), 0.0)
    for number in range(5):
        view.place(str(number), {"a": Share(1, 1, 0.5)}, float(number))
    row = row_of(view, "a")
    assert view.instances.num_pending[row] == view.num_placements() == 3
    assert not view.withdraw("0")
    assert view.withdraw("4")
    view.forget_old_placements(7.0)
    assert view.instances.num_pending[row] == 1
    assert view.instances.pending_seconds[row] == 0.5


def test_a_report_counts_a_placement_at_its_own_instance_alone() -> None:
    view = view_with("a", "b")
    view.place("r", {"a": Share(5, 0, 1.0), "b": Share(0, 3)}, 0.0)
    view.hear(report("a", 1, recent_request_ids=("r", "unknown")), 0.1)
    known = view.instances
    assert (known.num_pending[row_of(view, "a")], known.num_pending[row_of(view, "b")]) == (0, 1)
    assert view.num_placements() == 1
    view.hear(report("b", 1, recent_request_ids=("r",)), 0.2)
    assert view.num_placements() == 0
    assert not view.withdraw("r")
    assert not known.num_pending[[row_of(view, "a"), row_of(view, "b")]].any()


def test_a_worker_that_was_out_of_sight_comes_back_without_what_was_placed_on_it() -> None:
    view = view_with("a")
    view.place("r", {"a": Share(5, 2, 1.0)}, 0.0)
    view.set_members([])
    view.set_members([presence("a")])
    view.place("s", {"a": Share(5, 2, 1.0)}, 1.0)
    view.withdraw("r")
    assert view.instances.num_pending[row_of(view, "a")] == 1


def test_work_is_what_the_worker_says_and_at_least_what_its_waiting_tokens_cost() -> None:
    view = view_with("a", "b")
    cost = PrefillCost(0.0, 0.01, 0.0)
    view.hear(report("a", 1, queued_seconds=3.0, num_waiting_tokens=100, prefill_cost=cost), 0.0)
    view.hear(report("b", 1, queued_seconds=0.5, num_waiting_tokens=100, prefill_cost=cost), 0.0)
    queued = view.instances.queued_seconds
    assert (queued[row_of(view, "a")], queued[row_of(view, "b")]) == (3.0, 1.0)


def test_room_is_kept_for_what_running_answers_are_expected_to_take() -> None:
    view = view_with("a")
    view.hear(
        report(
            "a", 1, num_blocks=100, num_used_blocks=20, num_running=4, num_reserved=2, mean_output_tokens=160
        ),
        0.0,
    )
    row = row_of(view, "a")
    assert free_blocks(view.instances, 512)[row] == 100 - 20 - 4 * 5 - 2 * 10
    assert free_blocks(view.instances, 0)[row] == 100 - 20 - 4 - 2


@given(st.integers(1, 70))
def test_rows_grow_with_the_cluster_and_keep_what_they_hold(num_workers: int) -> None:
    names = [f"w{number:02}" for number in range(num_workers)]
    view = view_with()
    for count in range(1, num_workers + 1):
        view.set_members([presence(name) for name in names[:count]])
        view.hear(report(names[count - 1], 1, num_running=count), 0.0)
    assert len(view.ready(DECODE, 0.0)) == num_workers
    assert len(view.ready(PREFILL, 0.0)) == 0
    assert np.isfinite(free_blocks(view.instances, 512)).all()
    assert [num_requests(view.instances)[row_of(view, name)] for name in names] == list(
        range(1, num_workers + 1)
    )


class ViewMachine(RuleBasedStateMachine):
    """Workers come, go and come again; placements are counted, reported, withdrawn, forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.view = ClusterView(stale_after_seconds=3, placement_seconds=5, max_placements=8)
        self.alive: dict[str, str] = {}
        self.hidden = ""
        self.sent: dict[str, dict[str, Share]] = {}
        self.number = 0
        self.now = 0.0
        self.placed_at: dict[str, float] = {}
        self.chance = Random(3)

    @rule(name=st.sampled_from("abc"))
    def start(self, name: str) -> None:
        self.die(name)
        self.number += 1
        self.alive[name] = f"{name}-{self.number}"
        self.tell()

    @rule(name=st.sampled_from("abc"))
    def die(self, name: str) -> None:
        if name in self.alive:
            self.hidden = self.alive.pop(name)
            self.tell()
            for shares in self.sent.values():
                shares.pop(self.hidden, None)

    @rule()
    def come_back(self) -> None:
        name = self.hidden.partition("-")[0]
        if name and name not in self.alive:
            self.alive[name] = self.hidden
            self.tell()

    @rule(tokens=st.integers(0, 100), blocks=st.integers(0, 9), seconds=st.floats(0, 3))
    def place(self, tokens: int, blocks: int, seconds: float) -> None:
        if not self.alive:
            return
        self.number += 1
        request_id = f"r{self.number}"
        shares = {one: Share(tokens, blocks, seconds) for one in list(self.alive.values())[:2]}
        self.view.place(request_id, shares, self.now)
        self.sent[request_id], self.placed_at[request_id] = dict(shares), self.now
        while len(self.sent) > 8:
            del self.sent[next(iter(self.sent))]

    @rule(nth=st.integers(0, 7))
    def withdraw(self, nth: int) -> None:
        if self.sent:
            request_id = list(self.sent)[nth % len(self.sent)]
            assert self.view.withdraw(request_id)
            del self.sent[request_id]

    @rule(nth=st.integers(0, 7), name=st.sampled_from("abc"))
    def report_it(self, nth: int, name: str) -> None:
        if self.sent and name in self.alive:
            request_id = list(self.sent)[nth % len(self.sent)]
            self.number += 1
            self.view.hear(report(self.alive[name], self.number, recent_request_ids=(request_id,)), self.now)
            self.sent[request_id].pop(self.alive[name], None)
            if not self.sent[request_id]:
                del self.sent[request_id]

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.view.forget_old_placements(self.now)
        self.sent = {r: shares for r, shares in self.sent.items() if self.placed_at[r] + 5 > self.now}

    def tell(self) -> None:
        members = [
            Presence(kind=DECODE, name=name, incarnation=one, state=ServiceState.READY)
            for name, one in self.alive.items()
        ]
        self.chance.shuffle(members)
        self.view.set_members(members)

    @invariant()
    def every_row_has_the_sum_of_what_is_under_way_to_it(self) -> None:
        known = self.view.instances
        assert set(known.rows) == set(self.alive.values())
        expected: Counter[tuple[str, str]] = Counter()
        for shares in self.sent.values():
            for one, share in shares.items():
                expected[one, "requests"] += 1
                expected[one, "tokens"] += share.num_tokens
                expected[one, "blocks"] += share.num_blocks
        for one, row in known.rows.items():
            assert known.num_pending[row] == expected[one, "requests"]
            assert waiting_tokens(known)[row] == expected[one, "tokens"]
            assert known.num_pending_blocks[row] == expected[one, "blocks"]
            assert known.pending_seconds[row] >= -1e-9
            assert known.num_pending[row] or known.pending_seconds[row] == 0.0
        assert self.view.num_placements() == len(self.sent)


TestViewMachine = ViewMachine.TestCase
