from collections import Counter
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from libs.bus.messages.generation import Place, Placed, Refused
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.kv_events.view import KvView
from libs.request.outcome import RefusalReason
from libs.routing.policies import POLICIES
from services.router.admission import Admission, AdmissionRules, Answer
from services.router.choosing import Choosing
from services.router.matching import Matching
from services.router.view import ClusterView

PREFILL, DECODE = ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER
RULES = AdmissionRules(max_queue=4, no_workers_grace_seconds=5, starting_grace_seconds=30)
DEADLINE = 1000.0


def worker(
    kind: ServiceKind, incarnation: str, state: ServiceState = ServiceState.READY, **more: object
) -> Presence:
    return Presence(kind=kind, name=incarnation, incarnation=incarnation, state=state, **more)  # type: ignore[arg-type]  # kwargs of the tests


def report(kind: ServiceKind, incarnation: str, sequence: int, **load: object) -> LoadReport:
    figures = WorkerLoad(**{"num_blocks": 10, "block_size": 16, **load})  # type: ignore[arg-type]  # kwargs of the tests
    return LoadReport(kind=kind, incarnation=incarnation, sequence=sequence, load=figures)


def place(request_id: str, num_tokens: int = 15, deadline: float = DEADLINE, **more: object) -> Place:
    facts = {"request_id": request_id, "num_tokens": num_tokens, "deadline_unix_seconds": deadline, **more}
    return Place(**{"max_new_tokens": 8, **facts})  # type: ignore[arg-type]  # kwargs of the tests


class Mesh:
    """One router's deciders with a prefill and a decode worker, and a clock in the test's hand."""

    def __init__(
        self,
        *,
        policy: str = "least_load",
        rules: AdmissionRules = RULES,
        max_expected_output_tokens: int = 512,
    ) -> None:
        self.view = ClusterView(stale_after_seconds=3, placement_seconds=5, max_placements=100)
        self.held = KvView(1000)
        matching = Matching(Choosing(POLICIES[policy]), 10_000, max_expected_output_tokens)
        self.admission = Admission(rules, matching, self.view, self.held, 0.0, Random(1))
        self.now = 0.0
        self.members = [worker(PREFILL, "p0"), worker(DECODE, "d0")]
        self.sequence = 0

    def join(self) -> list[Answer]:
        self.view.set_members(self.members)
        return self.report_all()

    def report_all(self, **load: object) -> list[Answer]:
        self.sequence += 1
        for member in self.members:
            self.view.hear(report(member.kind, member.incarnation, self.sequence, **load), self.now)
        return self.admission.decide(self.now)

    def ask(self, place: Place) -> list[Answer]:
        return self.admission.enter(place, self.now)[1]


def outcomes(answers: list[Answer]) -> list[tuple[str, object]]:
    return [
        (a.ticket.place.request_id, a.outcome.reason if isinstance(a.outcome, Refused) else a.outcome.decode)
        for a in answers
    ]


def test_a_request_with_room_is_placed_at_once_on_a_pair() -> None:
    mesh = Mesh()
    mesh.join()
    [answer] = mesh.ask(place("r"))
    assert answer.outcome == Placed(prefill="p0", decode="d0")


def test_placements_take_room_until_withdrawn_and_the_queue_is_served_in_order() -> None:
    mesh = Mesh()
    mesh.join()
    assert len([mesh.ask(place(f"r{i}", num_tokens=5 * 16 - 1))[0] for i in range(2)]) == 2
    assert mesh.ask(place("big", num_tokens=100)) == []
    assert mesh.ask(place("small", num_tokens=1)) == []
    assert outcomes(mesh.admission.withdraw("r0", mesh.now)) == []
    assert outcomes(mesh.admission.withdraw("r1", mesh.now)) == [("big", "d0"), ("small", "d0")]


def test_a_report_that_names_a_request_replaces_the_placement() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.ask(place("r0", num_tokens=10 * 16 - 1))
    assert mesh.ask(place("r1")) == []
    assert mesh.report_all(num_used_blocks=9) == []
    assert outcomes(mesh.report_all(num_used_blocks=9, recent_request_ids=("r0",))) == [("r1", "d0")]


def test_a_placement_that_nobody_acts_on_is_forgotten() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.ask(place("r0", num_tokens=10 * 16 - 1))
    assert mesh.ask(place("r1")) == []
    mesh.now = 5.0
    assert outcomes(mesh.report_all()) == [("r1", "d0")]
    assert mesh.view.num_placements() == 1


def test_a_full_queue_refuses_the_newest_with_a_hint_when_to_return() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.report_all(num_used_blocks=10)
    assert [mesh.ask(place(f"r{i}")) for i in range(4)] == [[]] * 4
    [answer] = mesh.ask(place("r4"))
    assert isinstance(answer.outcome, Refused)
    assert answer.outcome.reason is RefusalReason.OVERLOADED
    assert answer.outcome.retry_after_seconds >= 1
    assert outcomes(mesh.report_all()) == [(f"r{i}", "d0") for i in range(4)]


def test_without_a_pair_requests_wait_for_the_grace_then_are_refused() -> None:
    mesh = Mesh()
    mesh.members = [worker(DECODE, "d0")]
    mesh.join()
    assert mesh.ask(place("r0")) == []
    assert mesh.admission.next_wake(0.0) <= 5
    mesh.now = 5.0
    assert outcomes(mesh.report_all()) == [("r0", RefusalReason.NO_WORKERS)]
    assert outcomes(mesh.ask(place("r1"))) == [("r1", RefusalReason.NO_WORKERS)]


def test_a_worker_that_starts_extends_the_patience_and_then_serves() -> None:
    mesh = Mesh()
    mesh.members = [worker(PREFILL, "p0"), worker(DECODE, "d0", ServiceState.STARTING)]
    mesh.join()
    assert mesh.ask(place("r0")) == []
    mesh.now = 20.0
    assert mesh.report_all() == []
    mesh.members[1] = worker(DECODE, "d0")
    assert outcomes(mesh.join()) == [("r0", "d0")]


def test_the_grace_counts_from_the_loss_of_the_last_pair() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.now = 100.0
    mesh.report_all()
    mesh.view.set_members([])
    mesh.now = 104.0
    assert mesh.ask(place("r0")) == []
    mesh.now = 105.0
    assert outcomes(mesh.admission.decide(mesh.now)) == [("r0", RefusalReason.NO_WORKERS)]


def test_a_router_that_stood_still_blames_nobody_for_its_own_silence() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.view.set_members([])
    assert mesh.ask(place("before")) == []
    mesh.now = 60.0
    mesh.admission.awoke(mesh.now)
    assert mesh.ask(place("after")) == []
    assert mesh.admission.next_wake(mesh.now) == 65.0
    assert outcomes(mesh.join()) == [("before", "d0"), ("after", "d0")]
    mesh.view.set_members([])
    mesh.ask(place("lost"))
    mesh.now = 65.0
    assert outcomes(mesh.admission.decide(mesh.now)) == [("lost", RefusalReason.NO_WORKERS)]


def test_a_silent_worker_is_not_used_and_its_silence_is_a_wake_up() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.report_all(num_used_blocks=10)
    assert mesh.ask(place("r0")) == []
    assert mesh.admission.next_wake(0.0) == 3.0
    mesh.now = 3.0
    assert mesh.ask(place("r1")) == []


def test_a_passed_deadline_refuses_also_behind_a_blocked_head() -> None:
    mesh = Mesh()
    mesh.join()
    mesh.report_all(num_used_blocks=10)
    mesh.ask(place("r0"))
    mesh.ask(place("r1", deadline=2.0))
    assert mesh.admission.next_wake(0.0) == 2.0
    assert outcomes(mesh.admission.decide(2.0)) == [("r1", RefusalReason.DEADLINE)]


@pytest.mark.parametrize(("num_tokens", "max_model_len"), [(160, 0), (50, 50)])
def test_what_fits_no_empty_pool_or_no_context_is_too_long(num_tokens: int, max_model_len: int) -> None:
    mesh = Mesh()
    mesh.members[1] = worker(DECODE, "d0", max_model_len=max_model_len)
    mesh.join()
    assert outcomes(mesh.ask(place("r0", num_tokens=num_tokens))) == [("r0", RefusalReason.TOO_LONG)]
    assert outcomes(mesh.ask(place("r1", num_tokens=num_tokens - 1))) == [("r1", "d0")]


def test_instances_of_different_fingerprints_are_no_pair() -> None:
    mesh = Mesh()
    mesh.members = [
        worker(PREFILL, "p0", model_fingerprint="a"),
        worker(DECODE, "d0", model_fingerprint="b"),
        worker(DECODE, "d1", model_fingerprint="a"),
    ]
    mesh.join()
    assert {outcomes(mesh.ask(place(f"r{i}")))[0] for i in range(4)} == {(f"r{i}", "d1") for i in range(4)}


def test_a_request_for_an_unknown_model_does_not_hold_up_the_others() -> None:
    mesh = Mesh()
    mesh.members = [worker(PREFILL, "p0", model="m"), worker(DECODE, "d0", model="m")]
    mesh.join()
    assert mesh.ask(place("r0", model="other")) == []
    assert outcomes(mesh.ask(place("r1", model="m"))) == [("r1", "d0")]
    mesh.now = 5.0
    assert outcomes(mesh.report_all()) == [("r0", RefusalReason.NO_WORKERS)]


def test_a_decode_instance_that_runs_prompts_needs_no_prefill_worker_and_leaves_them_to_one() -> None:
    mesh = Mesh()
    both = worker(DECODE, "d0", runs_prompts=True)
    mesh.members = [both]
    mesh.join()
    assert mesh.ask(place("r0"))[0].outcome == Placed(prefill="", decode="d0")
    mesh.members = [worker(PREFILL, "p0"), both]
    mesh.join()
    assert mesh.ask(place("r1"))[0].outcome == Placed(prefill="p0", decode="d0")


def test_an_excluded_instance_is_used_again_only_when_alone_and_heard_after_the_request() -> None:
    mesh = Mesh()
    mesh.members.append(worker(DECODE, "d1"))
    mesh.join()
    assert outcomes(mesh.ask(place("r0", exclude=("d0",)))) == [("r0", "d1")]
    assert mesh.ask(place("r1", exclude=("d0", "d1"))) == []
    mesh.now = 0.5
    assert [request_id for request_id, _ in outcomes(mesh.report_all())] == ["r1"]


def test_draining_refuses_those_who_wait_and_those_who_come() -> None:
    mesh = Mesh()
    assert mesh.ask(place("r0")) == []
    assert outcomes(mesh.admission.drain()) == [("r0", RefusalReason.DRAINING)]
    assert outcomes(mesh.ask(place("r1"))) == [("r1", RefusalReason.DRAINING)]
    assert len(mesh.admission) == 0


def test_a_prefill_queue_over_its_bound_takes_no_more_prompts() -> None:
    mesh = Mesh()
    mesh.join()
    assert mesh.report_all(num_waiting_tokens=10_000) == []
    assert mesh.ask(place("r0")) == []
    assert outcomes(mesh.report_all(num_waiting_tokens=9_999)) == [("r0", "d0")]


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of arrivals, withdrawals, reports, deaths: one answer each, in order, within capacity."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy: str) -> None:
        self.mesh = Mesh(policy=policy)
        self.mesh.members = [worker(PREFILL, "p0"), worker(DECODE, "d0"), worker(DECODE, "d1")]
        self.num_asked = 0
        self.answered: Counter[int] = Counter()
        self.waiting: list[str] = []
        self.held: dict[str, tuple[str, int, float]] = {}
        self.take(self.mesh.join())

    def take(self, answers: list[Answer]) -> None:
        placed: list[str] = []
        for answer in answers:
            self.answered[answer.ticket.number] += 1
            request_id = answer.ticket.place.request_id
            if isinstance(answer.outcome, Placed):
                placed.append(request_id)
                self.held[request_id] = (
                    answer.outcome.decode,
                    answer.ticket.place.num_tokens // 16 + 1,
                    self.mesh.now,
                )
            elif (
                answer.outcome.reason is RefusalReason.OVERLOADED
                and "waiting already" in answer.outcome.detail
            ):
                assert len(self.mesh.admission) == RULES.max_queue
            if request_id in self.waiting and not isinstance(answer.outcome, Placed):
                self.waiting.remove(request_id)
        assert placed == self.waiting[: len(placed)], "placed out of turn"
        del self.waiting[: len(placed)]

    @rule(num_tokens=st.integers(1, 159), patience=st.sampled_from([1.0, 50.0]))
    def ask(self, num_tokens: int, patience: float) -> None:
        self.num_asked += 1
        request_id = f"r{self.num_asked}"
        self.waiting.append(request_id)
        self.take(self.mesh.ask(place(request_id, num_tokens=num_tokens, deadline=self.mesh.now + patience)))

    @rule(nth=st.integers(0, 30))
    def withdraw(self, nth: int) -> None:
        known = [*self.waiting, *self.held]
        if known:
            request_id = known[nth % len(known)]
            self.held.pop(request_id, None)
            self.take(self.mesh.admission.withdraw(request_id, self.mesh.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.mesh.now += seconds
        self.take(self.mesh.admission.decide(self.mesh.now))
        # Placements nobody took up are forgotten by then, see above; the model forgets with them.
        self.held = {r: held for r, held in self.held.items() if held[2] + 5 > self.mesh.now}

    @rule()
    def hear(self) -> None:
        self.take(self.mesh.report_all())

    @rule(alive=st.sets(st.sampled_from(["p0", "d0", "d1"])))
    def live_and_die(self, alive: set[str]) -> None:
        self.mesh.members = [
            worker(PREFILL if name == "p0" else DECODE, name) for name in ("p0", "d0", "d1") if name in alive
        ]
        self.held = {r: held for r, held in self.held.items() if held[0] in alive}
        self.take(self.mesh.join())

    @invariant()
    def each_question_is_answered_once_or_waits(self) -> None:
        if hasattr(self, "mesh"):
            assert all(count == 1 for count in self.answered.values())
            assert len(self.answered) + len(self.mesh.admission) == self.num_asked
            assert len(self.mesh.admission) <= RULES.max_queue
            assert len(self.mesh.admission) == len(self.waiting)

    @invariant()
    def no_pool_is_promised_twice(self) -> None:
        for incarnation in ("d0", "d1"):
            if hasattr(self, "mesh"):
                assert sum(blocks for decode, blocks, _ in self.held.values() if decode == incarnation) <= 10


TestAdmissionMachine = AdmissionMachine.TestCase
