"""Whom the leaving of a process concerns."""

import pytest
from prometheus_client import CollectorRegistry

from libs.bus.messages.generation import TokenDelta, TokenFrame
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.request.sampling import SamplingParams
from services.gateway.generation.live import LiveSequences
from services.gateway.generation.sequence import Attempt, GenerationRequest, Sequence
from services.gateway.generation.text import SequenceText
from services.gateway.metrics import GatewayMetrics, Times


class Letters:
    def push(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def finish(self) -> str:
        return ""


class Clock:
    """Shows what a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def new_live(clock: Clock | None = None) -> LiveSequences:
    return LiveSequences(GatewayMetrics(CollectorRegistry()), clock or Clock())


def enter(live: LiveSequences, name: str, *, prefill: str = "", decode: str = "") -> Attempt:
    sequence = Sequence(
        request=GenerationRequest(answer_id=name, arrived_seconds=0, deadline_unix_seconds=0, format=None),
        choice=0,
        prompt=[1],
        sampling=SamplingParams(),
        text=SequenceText(Letters()),
        times=Times(arrived=0),
    )
    live.enter(sequence, lambda *_: None)
    attempt = sequence.begin_attempt(lambda: None)
    attempt.prefill, attempt.decode = prefill, decode
    live.attach(attempt, sequence)
    return attempt


def gone(kind: ServiceKind, incarnation: str, state: ServiceState = ServiceState.READY) -> Presence:
    return Presence(kind=kind, name=incarnation, incarnation=incarnation, state=state)


@pytest.mark.parametrize(
    ("state", "num_routers_left", "is_interrupted"),
    [
        (ServiceState.READY, 0, True),
        (ServiceState.READY, 1, True),
        (ServiceState.DRAINING, 0, True),
        (ServiceState.DRAINING, 1, False),
        (ServiceState.DRAINING, 2, False),
    ],
)
def test_a_router_that_answered_all_takes_nobody_with_it_who_waits_at_another(
    state: ServiceState, num_routers_left: int, is_interrupted: bool
) -> None:
    live = new_live()
    queued, placed = enter(live, "queued"), enter(live, "placed", prefill="p", decode="d")
    live.on_departed(gone(ServiceKind.ROUTER, "r", state), num_routers_left=num_routers_left)
    assert (queued.interruption is not None) == is_interrupted
    assert placed.interruption is None


def test_a_worker_takes_with_it_what_depends_on_it() -> None:
    live = new_live()
    by_decode = enter(live, "a", prefill="p1", decode="d1")
    by_prefill = enter(live, "b", prefill="p2", decode="d2")
    queued = enter(live, "c")
    live.on_departed(gone(ServiceKind.DECODE_WORKER, "d1"), num_routers_left=1)
    live.on_departed(gone(ServiceKind.PREFILL_WORKER, "p2"), num_routers_left=1)
    assert by_decode.interruption is not None
    assert by_prefill.interruption is not None
    assert by_decode.interruption.lost == "d1"
    assert by_prefill.interruption.lost == "p2"
    assert queued.interruption is None


def test_a_prefill_worker_is_not_needed_after_the_first_token() -> None:
    live = new_live()
    attempt = enter(live, "a", prefill="p", decode="d")
    live.on_frame(TokenFrame(worker="d", deltas=[TokenDelta(attempt.request_id, 0, (65,))]))
    live.on_departed(gone(ServiceKind.PREFILL_WORKER, "p"), num_routers_left=1)
    assert attempt.interruption is None


def ended(worker: str, *request_ids: str) -> LoadReport:
    load = WorkerLoad(num_running=1, ended_request_ids=request_ids)
    return LoadReport(kind=ServiceKind.DECODE_WORKER, incarnation=worker, sequence=1, load=load)


def test_what_its_worker_has_ended_for_two_reports_is_replayed_and_nothing_else() -> None:
    clock = Clock()
    live = new_live(clock)
    lost, other, elsewhere = (enter(live, name, prefill="p", decode="d") for name in "abc")
    elsewhere.decode = "e"
    for clock.seconds in (1.0, 1.02, 1.15):
        live.on_load(ended("d", lost.request_id, elsewhere.request_id, "unknown"))
        assert lost.interruption is None
    clock.seconds = 1.25
    live.on_load(ended("d", lost.request_id, elsewhere.request_id, "unknown"))
    assert lost.interruption is not None
    assert lost.interruption.lost == lost.interruption.suspect == ""
    assert other.interruption is elsewhere.interruption is None


def test_tokens_that_come_later_than_the_report_of_their_end_are_taken() -> None:
    clock = Clock()
    live = new_live(clock)
    late = enter(live, "a", prefill="p", decode="d")
    clock.seconds = 1.0
    live.on_load(ended("d", late.request_id))
    clock.seconds = 1.2
    live.on_frame(TokenFrame(worker="d", deltas=[TokenDelta(late.request_id, 0, (65,))]))
    clock.seconds = 1.3
    live.on_load(ended("d", late.request_id))
    assert late.interruption is None
    clock.seconds = 1.55
    live.on_load(ended("d", late.request_id))
    assert late.interruption is not None
