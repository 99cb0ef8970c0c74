"""The sessions of this gateway as the bus's messages find them: frames, departures, load reports. No I/O."""

import asyncio

import structlog

from libs.bus.messages.generation import TokenDelta, TokenFrame
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.request.outcome import FailureReason
from services.gateway.generation.session import Attempt, Failed, Interruption, Session
from services.gateway.metrics import GatewayMetrics

MAX_STRAYS = 10_000
IDLE_REPORTS_BEFORE_LOST = 4
IDLE_SECONDS_BEFORE_LOST = 2.0
ENDED_SECONDS_BEFORE_LOST = 0.2
"""Between two reports that name an attempt: some follow each other closely, or come before its last frame."""

log = structlog.get_logger()


class LiveSessions:
    """Sessions from their admission to their end, and which attempt is whose."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._sessions: dict[int, Session] = {}
        self._by_attempt: dict[str, Session] = {}
        self._strays: dict[str, str] = {}
        self._strays_came = asyncio.Event()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Sessions without a token yet."""
        return sum(session.times.first_token is None for session in self._sessions.values())

    def enter(self, session: Session) -> None:
        """From now on it counts."""
        self._sessions[id(session)] = session

    def leave(self, session: Session) -> None:
        """It has its outcome."""
        self._sessions.pop(id(session), None)

    def attach(self, attempt: Attempt, session: Session) -> None:
        """Deltas of this attempt go to the session."""
        self._by_attempt[attempt.request_id] = session

    def detach(self, attempt: Attempt) -> None:
        """Deltas of this attempt match nothing any more."""
        self._by_attempt.pop(attempt.request_id, None)

    def on_frame(self, frame: TokenFrame, now: float) -> None:
        """Give each delta to its session; one call per step of a worker."""
        for delta in frame.deltas:
            session = self._by_attempt.get(delta.request_id)
            if session is None:
                self._note_stray(delta, frame.worker)
                continue
            last = session.times.last_token
            try:
                num_new = session.accept(delta, now, frame.worker)
            except Exception:  # one broken session must not take the frame from the others
                log.exception("delta_not_taken", session=session.name)
                session.end(Failed(FailureReason.INTERNAL, "its tokens could not be put into words"))
                continue
            if num_new:
                self._metrics.note_tokens(session, num_new, last, now)

    def on_departed(self, presence: Presence, *, num_routers_left: int = 0) -> None:
        """A process left: interrupt what cannot go on without it.

        Which of several routers a request waits at is not known here. One that was draining has answered all
        that waited there, so while others are left, what still waits does so at those.
        """
        was_router = presence.kind is ServiceKind.ROUTER
        has_answered = presence.state is ServiceState.DRAINING and num_routers_left > 0
        for session in list(self._by_attempt.values()):
            attempt = session.attempt
            if attempt is None:
                continue
            if attempt.depends_on(presence.incarnation):
                detail = f"{presence.name} left the mesh"
                session.interrupt(Interruption(FailureReason.PEER_LOST, detail, lost=presence.incarnation))
            elif was_router and not has_answered and not attempt.decode:
                detail = f"{presence.name} left while the request was queued there"
                session.interrupt(Interruption(FailureReason.PEER_LOST, detail))

    def on_load(self, report: LoadReport, now: float) -> None:
        """What a worker has ended, or cannot be working on because it has nothing to do, but is not over here
        has lost its last frame."""
        load = report.load
        self._heed_ended(report, now)
        is_idle = not (load.num_running or load.num_waiting or load.num_reserved)
        if not is_idle or report.kind is not ServiceKind.DECODE_WORKER:
            return
        for session in list(self._by_attempt.values()):
            attempt = session.attempt
            if attempt is None or attempt.decode != report.incarnation or not attempt.is_begun:
                continue
            attempt.num_idle_reports += 1
            is_silent = now - attempt.last_heard_seconds >= IDLE_SECONDS_BEFORE_LOST
            if is_silent and attempt.num_idle_reports >= IDLE_REPORTS_BEFORE_LOST:
                detail = f"its worker no longer knows {attempt.request_id}"
                session.interrupt(Interruption(FailureReason.PEER_LOST, detail))

    def _heed_ended(self, report: LoadReport, now: float) -> None:
        for request_id in report.load.ended_request_ids:
            session = self._by_attempt.get(request_id)
            attempt = session.attempt if session is not None else None
            if session is None or attempt is None or attempt.request_id != request_id:
                continue
            if attempt.decode != report.incarnation:
                continue
            if attempt.told_ended_seconds is None:
                attempt.told_ended_seconds = now
            elif now - attempt.told_ended_seconds >= ENDED_SECONDS_BEFORE_LOST:
                detail = f"the last tokens of {request_id} never arrived"
                session.interrupt(Interruption(FailureReason.PEER_LOST, detail))

    def end_all(self, outcome: Failed) -> None:
        """Nothing goes on: this gateway ends."""
        for session in list(self._sessions.values()):
            session.end(outcome)

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
