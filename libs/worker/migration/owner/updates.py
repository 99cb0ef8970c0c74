"""Publishes placements and migrations. What nobody can hear is not kept: it is published again anyway."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError, NotConnected, Overloaded
from libs.bus.messages.migration import MigrationRecord, MigrationUpdate, PlacementUpdate

PUBLISH_SECONDS = 1.0
_MAX_UNPUBLISHED = 64

log = structlog.get_logger()


class PlacementPublisher:
    """Publishes what `placement` gives once a second and after `changed`."""

    def __init__(self, bus: Bus, placement: Callable[[], PlacementUpdate]) -> None:
        self._bus, self._placement = bus, placement
        self._unpublished: deque[MigrationRecord] = deque(maxlen=_MAX_UNPUBLISHED)
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something is different now."""
        self._changed.set()

    def moved(self, record: MigrationRecord) -> None:
        """A migration entered a phase."""
        self._unpublished.append(record)
        self._changed.set()

    async def run(self) -> NoReturn:
        """Publish, for ever."""
        while True:
            self._changed.clear()
            try:
                await self._publish()
            except BusError as error:
                log.debug("placement_not_published", error=str(error))
            try:
                async with asyncio.timeout(PUBLISH_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _publish(self) -> None:
        while self._unpublished:
            record = self._unpublished.popleft()
            try:
                await self._bus.publish(MigrationUpdate(record=record))
            except (NotConnected, Overloaded):  # any other would come again each time
                self._unpublished.appendleft(record)
                raise
        await self._bus.publish(self._placement())
