"""Tells the mesh of placements and moves. What nobody can hear is not kept: it is told again anyway."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError, NotConnected, Overloaded
from libs.bus.messages.migration import MoveRecord, MoveTold, PlacementTold

TELL_SECONDS = 1.0
_MAX_UNTOLD = 64

log = structlog.get_logger()


class Telling:
    """`placement` gives what is to be told once a second and after `changed`."""

    def __init__(self, bus: Bus, placement: Callable[[], PlacementTold]) -> None:
        self._bus, self._placement = bus, placement
        self._untold: deque[MoveRecord] = deque(maxlen=_MAX_UNTOLD)
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something is different now."""
        self._changed.set()

    def moved(self, record: MoveRecord) -> None:
        """A move entered a phase."""
        self._untold.append(record)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Tell, for ever."""
        while True:
            self._changed.clear()
            try:
                await self._tell()
            except BusError as error:
                log.debug("placement_not_told", error=str(error))
            try:
                async with asyncio.timeout(TELL_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _tell(self) -> None:
        while self._untold:
            record = self._untold.popleft()
            try:
                await self._bus.publish(MoveTold(move=record))
            except (NotConnected, Overloaded):  # any other would come again each time
                self._untold.appendleft(record)
                raise
        await self._bus.publish(self._placement())
