"""The sequences of this gateway as the bus's messages find them: frames, departures, load reports. No I/O."""

import asyncio
import time
from collections.abc import Callable

import structlog

from libs.bus.messages.generation import TokenDelta, TokenFrame
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.request.outcome import FailureReason
from services.gateway.generation.sequence import Attempt, Failed, Interruption, Sequence
from services.gateway.generation.text import TextDelta
from services.gateway.metrics import GatewayMetrics

MAX_STRAYS = 10_000
IDLE_REPORTS_BEFORE_LOST = 4
IDLE_SECONDS_BEFORE_LOST = 2.0
ENDED_SECONDS_BEFORE_LOST = 0.2
"""Between two reports that name an attempt: some follow each other closely, or come before its last frame."""

OnText = Callable[[Sequence, TextDelta], None]
"""Gets what each delta adds to the answer, in order, and the end; called on the loop, never waits."""

log = structlog.get_logger()


class LiveSequences:
    """Sequences from their admission to their end, and which attempt is whose."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._sequences: dict[int, tuple[Sequence, OnText]] = {}
        self._by_attempt: dict[str, Sequence] = {}
        self._strays: dict[str, str] = {}
        self._strays_came = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences without a token yet."""
        return sum(sequence.times.first_token is None for sequence, _ in self._sequences.values())

    def enter(self, sequence: Sequence, on_text: OnText) -> None:
        """From now on it counts."""
        self._sequences[id(sequence)] = sequence, on_text

    def leave(self, sequence: Sequence) -> None:
        """It has its outcome."""
        self._sequences.pop(id(sequence), None)

    def attach(self, attempt: Attempt, sequence: Sequence) -> None:
        """Deltas of this attempt go to the sequence."""
        self._by_attempt[attempt.request_id] = sequence

    def detach(self, attempt: Attempt) -> None:
        """Deltas of this attempt match nothing any more."""
        self._by_attempt.pop(attempt.request_id, None)

    def on_frame(self, frame: TokenFrame) -> None:
        """Give each delta to its sequence; one call per step of a worker."""
        now = self._clock()
        for delta in frame.deltas:
            sequence = self._by_attempt.get(delta.request_id)
            if sequence is None:
                self._note_stray(delta, frame.worker)
                continue
            try:
                self._accept(sequence, delta, now, frame.worker)
            except Exception:  # one broken sequence must not take the frame from the others
                log.exception("delta_not_accepted", sequence=sequence.name)
                sequence.end(Failed(FailureReason.INTERNAL, "its tokens could not be put into words"))

    def _accept(self, sequence: Sequence, delta: TokenDelta, now: float, worker: str) -> None:
        times, num_before, last = sequence.times, len(sequence.output), sequence.times.last_token
        added = sequence.accept(delta, now, worker)
        if added is not None:
            _, on_text = self._sequences[id(sequence)]
            on_text(sequence, added)
        if num_new := len(sequence.output) - num_before:
            self._metrics.note_tokens(times, num_new, last, sequence.num_cached_tokens)

    def on_departed(self, presence: Presence, *, num_routers_left: int = 0) -> None:
        """A process left: interrupt what cannot go on without it.

        Which of several routers a request waits at is not known here. One that was draining has answered all
        that waited there, so while others are left, what still waits does so at those.
        """
        was_router = presence.kind is ServiceKind.ROUTER
        has_answered = presence.state is ServiceState.DRAINING and num_routers_left > 0
        for sequence in list(self._by_attempt.values()):
            attempt = sequence.attempt
            if attempt is None:
                continue
            if attempt.depends_on(presence.incarnation):
                detail = f"{presence.name} left the mesh"
                sequence.interrupt(Interruption(FailureReason.PEER_LOST, detail, lost=presence.incarnation))
            elif was_router and not has_answered and not attempt.decode:
                detail = f"{presence.name} left while the request was queued there"
                sequence.interrupt(Interruption(FailureReason.PEER_LOST, detail))

    def on_load(self, report: LoadReport) -> None:
        """What a worker has ended, or cannot be working on because it has nothing to do, but is not over here
        has lost its last frame."""
        load, now = report.load, self._clock()
        self._on_ended(report, now)
        is_idle = not (load.num_running or load.num_waiting or load.num_reserved)
        if not is_idle or report.kind is not ServiceKind.DECODE_WORKER:
            return
        for sequence in list(self._by_attempt.values()):
            attempt = sequence.attempt
            if attempt is None or attempt.decode != report.incarnation or not attempt.is_begun:
                continue
            attempt.num_idle_reports += 1
            is_silent = now - attempt.last_heard_seconds >= IDLE_SECONDS_BEFORE_LOST
            if is_silent and attempt.num_idle_reports >= IDLE_REPORTS_BEFORE_LOST:
                detail = f"its worker no longer knows {attempt.request_id}"
                sequence.interrupt(Interruption(FailureReason.PEER_LOST, detail))

    def _on_ended(self, report: LoadReport, now: float) -> None:
        for request_id in report.load.ended_request_ids:
            sequence = self._by_attempt.get(request_id)
            attempt = sequence.attempt if sequence is not None else None
            if sequence is None or attempt is None or attempt.request_id != request_id:
                continue
            if attempt.decode != report.incarnation:
                continue
            if attempt.reported_ended_seconds is None:
                attempt.reported_ended_seconds = now
            elif now - attempt.reported_ended_seconds >= ENDED_SECONDS_BEFORE_LOST:
                detail = f"the last tokens of {request_id} never arrived"
                sequence.interrupt(Interruption(FailureReason.PEER_LOST, detail))

    def end_all(self, outcome: Failed) -> None:
        """Nothing goes on: this gateway ends."""
        for sequence, _ in list(self._sequences.values()):
            sequence.end(outcome)

    async def take_strays(self) -> dict[str, str]:
        """Wait for sequences that nobody here waits for; their ids with the worker that works on them."""
        await self._strays_came.wait()
        self._strays_came.clear()
        strays, self._strays = self._strays, {}
        return strays

    def _note_stray(self, delta: TokenDelta, worker: str) -> None:
        self._metrics.stale_deltas.inc()
        is_last = delta.finish is not None or delta.failure is not None
        if not is_last and len(self._strays) < MAX_STRAYS:
            self._strays[delta.request_id] = worker
            self._strays_came.set()
