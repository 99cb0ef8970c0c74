"""Tells the mesh what KV is here: batches of events as it changes, and snapshots to who asks.

One way to live: open (answer snapshots), run (publish, for ever), close.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError
from libs.bus.messages.kv_events import KvEvents, KvSnapshot, KvSnapshotPage, Tier
from libs.bus.messages.presence import ServiceKind
from libs.bus.subscriptions import Subscription
from libs.kv.names import NAME_BYTES
from libs.kv_events.log import KvEventLog
from libs.kv_events.snapshots import Holdings, SnapshotPages

BEAT_SECONDS = 2.0
"""An idle publisher says so this often: a follower that missed the last event learns of it."""
MAX_WAITING_NAMES = 1 << 17
_MAX_BATCH_NAMES = 1 << 11
"""A follower takes a millisecond for so many; it has other things to do."""
_ENVELOPE_BYTES = 4096
"""All of a message but its names, at most."""

log = structlog.get_logger()


class KvEventPublisher:
    """Used on the event loop. `stored`, `removed` and `cleared` take effect at once and never block.

    `held` gives all that is here when a follower asks (see `Holdings`); it may be a coroutine function. Every
    change that it has seen must have been told here by the time it returns. Its argument is how many names of
    each tier the follower takes, None for any number: it takes the first.
    """

    def __init__(
        self,
        bus: Bus,
        incarnation: str,
        kind: ServiceKind,
        held: Callable[[int | None], Holdings | Awaitable[Holdings]],
        *,
        interval_seconds: float = 0.1,
        beat_seconds: float = BEAT_SECONDS,
        max_waiting_names: int = MAX_WAITING_NAMES,
    ) -> None:
        self._bus, self._incarnation, self._kind, self._held = bus, incarnation, kind, held
        self._interval_seconds, self._beat_seconds = interval_seconds, beat_seconds
        self._max_names = max(
            1, min(_MAX_BATCH_NAMES, (bus.max_payload_bytes - _ENVELOPE_BYTES) // NAME_BYTES)
        )
        self._log = KvEventLog(max_waiting_names)
        self._pages = SnapshotPages(self._max_names)
        self._changed = asyncio.Event()
        self._serving: Subscription | None = None

    @property
    def num_waiting_names(self) -> int:
        """Names in events that are not published yet."""
        return self._log.num_waiting_names

    @property
    def num_overflows_total(self) -> int:
        """How often followers were sent to a snapshot because too much waited."""
        return self._log.num_overflows_total

    def stored(self, tier: Tier, names: Sequence[bytes]) -> None:
        """These blocks are in this tier now."""
        self._log.stored(tier, names)
        self._changed.set()

    def removed(self, tier: Tier, names: Sequence[bytes]) -> None:
        """They are not in this tier any more."""
        self._log.removed(tier, names)
        self._changed.set()

    def cleared(self, tier: Tier) -> None:
        """Nothing is in this tier any more."""
        self._log.cleared(tier)
        self._changed.set()

    async def open(self) -> None:
        """Answer snapshots from now on."""
        self._serving = await self._bus.serve(KvSnapshot, self._snapshot, at=self._incarnation)

    async def run(self) -> NoReturn:
        """Publish for ever: what changed once per interval, and a beat while nothing does."""
        while True:
            self._changed.clear()
            await self._publish()
            await asyncio.sleep(self._interval_seconds)
            await self._wait_for_change()

    async def close(self) -> None:
        """Answer no more."""
        if self._serving is not None:
            await self._serving.close()

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(self._beat_seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _publish(self) -> None:
        """All that waits, or an empty batch. While the broker is away it goes on waiting, up to its bound."""
        while self._bus.is_connected:
            events = self._log.take(self._max_names)
            message = KvEvents(
                publisher=self._incarnation, kind=self._kind, sequence=self._log.sequence, events=events
            )
            try:
                await self._bus.publish(message)
            except BusError as error:
                # Its number is spent, so followers see a gap; the skip sees to it that they see it soon.
                self._log.skip()
                log.info("kv_events_not_sent", error=str(error))
                return
            if not self._log.is_due:
                return

    async def _snapshot(self, question: KvSnapshot) -> KvSnapshotPage:
        if question.page:
            return self._pages.turn(question.page)
        # The number first: what `held` tells may be newer than it, never older.
        sequence = self._log.sequence
        holdings = self._held(question.max_names)
        if inspect.isawaitable(holdings):
            holdings = await holdings
        return self._pages.begin(holdings, sequence, question.max_names)
