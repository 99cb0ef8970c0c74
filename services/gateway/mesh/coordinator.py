"""The leading migration coordinator as the gateway asks it; what the bus says becomes what clients see."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

from libs.bus.bus import Bus
from libs.bus.errors import BusError, HandlerFailed, NoResponders, NotConnected, Overloaded, RequestTimedOut
from libs.bus.messages.migration import ExplainRounds, Rounds
from services.gateway.api.errors import ApiError, DeadlineOver, Failed, Unavailable

ANSWER_TIMEOUT_SECONDS = 10.0
LOOK_SECONDS = 2.0
"""How often the loop's last round is asked for: the coordinator tells it to nobody by itself."""
RETRY_SECONDS = 2


async def ask_coordinator(bus: Bus, request: ExplainRounds) -> Rounds:
    """Its answer. Raises Unavailable without one that leads, DeadlineOver, Failed."""
    try:
        return await bus.request(request, timeout_seconds=ANSWER_TIMEOUT_SECONDS)
    except BusError as error:
        raise _as_api_error(error) from error


def _as_api_error(error: BusError) -> ApiError:
    match error:
        case NoResponders():
            return _unavailable(
                "no migration coordinator leads now; start one (kvmesh up --coordinators 1), "
                "or try again if one has just left"
            )
        case NotConnected():
            return _unavailable(f"{error}; try again when the broker is back")
        case Overloaded():
            return _unavailable(f"{error}; try again")
        case RequestTimedOut():
            said = f"no answer of the coordinator within {ANSWER_TIMEOUT_SECONDS:g} seconds; try again"
            return DeadlineOver(said, code="coordinator_timeout")
        case HandlerFailed():
            return Failed("the coordinator could not answer; it has logged why")
        case _:
            return Failed(str(error))


def _unavailable(said: str) -> ApiError:
    return Unavailable(said, code="no_coordinator", retry_after_seconds=RETRY_SECONDS)


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
