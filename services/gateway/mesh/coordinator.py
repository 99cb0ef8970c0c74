"""The leading migration coordinator as the gateway asks it; what the bus says becomes what clients see."""

import asyncio
from collections.abc import Callable
from typing import NoReturn, TypeVar

from libs.bus.bus import Bus
from libs.bus.errors import BusError, HandlerFailed, NoResponders, NotConnected, Overloaded, RequestTimedOut
from libs.bus.message import Request
from libs.bus.messages.migration import (
    CancelMove,
    DenialReason,
    ExplainRounds,
    MoveDenied,
    PlanMove,
    Rounds,
)
from services.gateway.api.errors import ApiError, DeadlineOver, Failed, Unavailable

ANSWER_TIMEOUT_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""How often the loop's last round is asked for: the coordinator tells it to nobody by itself."""

Answer = TypeVar("Answer")
RETRY_SECONDS = 2


async def ask_coordinator(bus: Bus, request: Request[Answer]) -> Answer:
    """Its answer. Raises Unavailable without one that leads, DeadlineOver, Failed."""
    try:
        return await bus.request(request, timeout_seconds=ANSWER_TIMEOUT_SECONDS)
    except BusError as error:
        raise _as_api_error(error, changes=isinstance(request, PlanMove | CancelMove)) from error


def no_answer_error(denied: MoveDenied) -> ApiError | None:
    """What clients see where nobody could say yes or no to an order; None of a denial that is an answer."""
    match denied.reason:
        case DenialReason.NOT_LEADING:
            return _unavailable(denied.detail)
        case DenialReason.UNREACHABLE:
            return _unavailable(denied.detail, code="worker_unreachable")
        case DenialReason.NO_ANSWER:
            return DeadlineOver(denied.detail, code="worker_timeout")
        case DenialReason.FAILED:
            return Failed(denied.detail)
        case _:
            return None


def _as_api_error(error: BusError, *, changes: bool) -> ApiError:
    match error:
        case NoResponders():
            return _unavailable(
                "no migration coordinator leads now; start one (kvmesh up --coordinators 1), "
                "or try again if one has just left"
            )
        case NotConnected():
            look = "; look at GET /v1/mesh/migrations first: it may have begun" if changes else ""
            return _unavailable(f"{error}; try again when the broker is back{look}")
        case Overloaded():
            return _unavailable(f"{error}; try again")
        case RequestTimedOut():
            may_be = "it may have begun what was asked for: GET /v1/mesh/migrations tells"
            return DeadlineOver(
                f"no answer of the coordinator within {ANSWER_TIMEOUT_SECONDS:g} seconds; "
                + (may_be if changes else "try again"),
                code="coordinator_timeout",
            )
        case HandlerFailed():
            return Failed("the coordinator could not answer; it has logged why")
        case _:
            return Failed(str(error))


def _unavailable(said: str, *, code: str = "no_coordinator") -> ApiError:
    return Unavailable(said, code=code, retry_after_seconds=RETRY_SECONDS)


class LoopWatch:
    """Keeps the last round of the coordinator's loop, for those who look at the mesh."""

    def __init__(self, bus: Bus, changed: Callable[[], None]) -> None:
        self._bus, self._changed = bus, changed
        self.last: Rounds | None = None
        """None: there is no coordinator, or it has not answered."""

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            before, self.last = self.last, await self._ask()
            if before != self.last:
                self._changed()
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask(self) -> Rounds | None:
        try:
            return await self._bus.request(ExplainRounds(num_rounds=1), timeout_seconds=LOOK_SECONDS)
        except BusError:
            return None
