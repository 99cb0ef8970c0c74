"""What to do when an attempt came to nothing: again elsewhere, again later, or the end. Pure."""

from dataclasses import dataclass, field

from libs.bus.messages.generation import Refused
from libs.request.outcome import RETRYABLE, RefusalReason
from services.gateway.generation.sequence import Failed, Interruption, Outcome

ROUTER = ""
"""Stands for the router where a worker's incarnation would stand."""
RETRY_SECONDS = 0.25
MAX_WAIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class RefusedBy:
    """The router (ROUTER) or a worker said no before anything was begun."""

    who: str
    answer: Refused


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Nobody answers under this name, or the broker is away (then `who` is ROUTER)."""

    who: str
    detail: str


Trouble = RefusedBy | Unreachable | Interruption


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_attempts` counts sequences begun on a worker, `max_refusals` placements that led to none."""

    replay: bool = True
    max_attempts: int = 3
    max_refusals: int = 8
    router_patience_seconds: float = 5.0
    replay_patience_seconds: float = 30.0
    """How long a sequence whose worker was lost waits for another one to come up."""


@dataclass(slots=True)
class History:
    """What one sequence went through. `lost` are gone for good, `busy` may be chosen again later."""

    num_begun: int = 0
    num_refusals: int = 0
    seconds_without_router: float = 0.0
    interrupted_at: float | None = None
    """When a worker was last lost that had begun it, in seconds of the caller's clock."""
    lost: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)

    @property
    def exclude(self) -> tuple[str, ...]:
        """Whom the router must not choose."""
        return tuple(sorted(self.lost | self.busy))


@dataclass(frozen=True, slots=True)
class Again:
    """Place it again after `wait_seconds`."""

    wait_seconds: float = 0.0


def next_step(trouble: Trouble, history: History, limits: Limits, now: float) -> Again | Outcome:
    """Judge the trouble and note it in `history`. Every sequence ends: each branch counts against a limit."""
    match trouble:
        case Interruption():
            return _after_interruption(trouble, history, limits, now)
        case Unreachable(who=who):
            return _after_silence(who, trouble.detail, history, limits)
        case RefusedBy(who=who):
            if who == ROUTER:
                return _after_router_refused(trouble.answer, history, limits, now)
            return _after_worker_refused(who, trouble.answer, history, limits)


def _after_interruption(
    trouble: Interruption, history: History, limits: Limits, now: float
) -> Again | Outcome:
    history.interrupted_at = now
    if trouble.lost:
        history.lost.add(trouble.lost)
    if trouble.suspect:
        history.busy.add(trouble.suspect)
    if trouble.reason not in RETRYABLE:
        return Failed(trouble.reason, trouble.detail)
    if not limits.replay:
        return Failed(trouble.reason, f"{trouble.detail}; replay is switched off")
    if history.num_begun >= limits.max_attempts:
        return Failed(trouble.reason, f"{trouble.detail}; gave up after {history.num_begun} attempts")
    return _count_refusal(history, limits, RefusalReason.NO_WORKERS, trouble.detail) or Again()


def _after_silence(who: str, detail: str, history: History, limits: Limits) -> Again | Outcome:
    if who == ROUTER:
        if history.seconds_without_router >= limits.router_patience_seconds:
            return Refused(reason=RefusalReason.NO_WORKERS, detail=detail)
        history.seconds_without_router += RETRY_SECONDS
        return Again(RETRY_SECONDS)
    history.lost.add(who)
    return _count_refusal(history, limits, RefusalReason.NO_WORKERS, detail) or Again()


def _after_router_refused(answer: Refused, history: History, limits: Limits, now: float) -> Again | Outcome:
    wait_seconds = min(answer.retry_after_seconds, MAX_WAIT_SECONDS)
    if answer.reason is RefusalReason.DRAINING:
        # This router is leaving; another, or its successor, can place the request.
        refused = _count_refusal(history, limits, answer.reason, answer.detail)
        return refused or Again(max(wait_seconds, RETRY_SECONDS))
    if answer.reason is not RefusalReason.NO_WORKERS:
        return answer
    if history.busy:
        # Only those that were full a moment ago are left: ask them again, a little later.
        history.busy.clear()
        refused = _count_refusal(history, limits, RefusalReason.OVERLOADED, "all workers are full")
        return refused or Again(wait_seconds)
    if history.interrupted_at is None or now - history.interrupted_at >= limits.replay_patience_seconds:
        return answer
    # The client has a part of its text already, and the lost worker is likely to be started again.
    return Again(max(wait_seconds, RETRY_SECONDS))


def _after_worker_refused(who: str, answer: Refused, history: History, limits: Limits) -> Again | Outcome:
    if answer.reason in (RefusalReason.TOO_LONG, RefusalReason.DEADLINE):
        return answer
    history.busy.add(who)
    return _count_refusal(history, limits, RefusalReason.OVERLOADED, answer.detail) or Again()


def _count_refusal(history: History, limits: Limits, reason: RefusalReason, detail: str) -> Refused | None:
    history.num_refusals += 1
    if history.num_refusals < limits.max_refusals:
        return None
    return Refused(reason=reason, detail=f"{detail}; placed {history.num_refusals} times in vain")
