"""Keeps a `KvView` right by the bus: hears events, fetches snapshots where some were missed.

One way to live: open (hear), run (fetch snapshots, sweep; for ever), close.
"""

import asyncio
from collections.abc import Iterable
from typing import NoReturn

import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError
from libs.bus.messages.kv_events import KvEvents, KvSnapshot
from libs.bus.subscriptions import Subscription
from libs.kv_events.follower import Follower, SnapshotReader
from libs.kv_events.view import KvView

SNAPSHOT_SECONDS = 5.0
"""For the answer to one page."""
MAX_SNAPSHOTS_AT_ONCE = 8
MAX_ROUNDS = 4
"""Snapshots in a row for one publisher; after that its next message asks again."""
SWEPT_NAMES = 2048
"""In one go: about a millisecond."""

log = structlog.get_logger()


class KvSubscriber:
    """Follows the publishers it is told of, and no others: what comes late from one that is gone must not
    bring it back."""

    def __init__(self, bus: Bus, view: KvView) -> None:
        self._bus, self._view = bus, view
        self._followers: dict[str, Follower] = {}
        self._waiting: dict[str, None] = {}
        self._fetching: set[str] = set()
        self._due = asyncio.Event()
        self._subscription: Subscription | None = None
        self.num_snapshots_total = 0
        self.num_failures_total = 0
        """Snapshots that were asked for in vain."""

    @property
    def num_behind(self) -> int:
        """Publishers whose blocks are not known now, as far as they said anything."""
        return len(self._waiting) + len(self._fetching)

    async def open(self) -> None:
        """Hear events from now on."""
        self._subscription = await self._bus.subscribe(KvEvents, self.hear)

    def set_publishers(self, incarnations: Iterable[str]) -> None:
        """Those who are there now. Who is not any more is forgotten, with all it held."""
        present = set(incarnations)
        for gone in self._followers.keys() - present:
            del self._followers[gone]
            self._waiting.pop(gone, None)
            self._view.forget(gone)
            self._view.forget(_draft(gone))
            self._due.set()
        for new in present - self._followers.keys():
            self._followers[new] = Follower()

    def hear(self, message: KvEvents) -> None:
        """The next events of a publisher."""
        publisher = message.publisher
        follower = self._followers.get(publisher)
        if follower is None:
            return
        for event in follower.hear(message):
            self._view.apply(publisher, event)
        if follower.is_behind and publisher not in self._fetching:
            self._waiting[publisher] = None
            self._due.set()

    async def run(self) -> NoReturn:
        """For ever: snapshots of those who are behind, some at once; sweeping after those who are gone."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._due.wait()
                self._due.clear()
                while self._waiting and len(self._fetching) < MAX_SNAPSHOTS_AT_ONCE:
                    publisher = next(iter(self._waiting))
                    del self._waiting[publisher]
                    self._fetching.add(publisher)
                    tasks.create_task(self._fetch(publisher))
                while self._view.sweep(SWEPT_NAMES):  # noqa: ASYNC110 - work, not waiting: others get their turn
                    await asyncio.sleep(0)
        raise RuntimeError("the loop above has no end")

    async def close(self) -> None:
        """Hear no more."""
        if self._subscription is not None:
            await self._subscription.close()

    async def _fetch(self, publisher: str) -> None:
        follower = self._followers.get(publisher)
        try:
            for _ in range(MAX_ROUNDS):
                if follower is None or await self._snapshot(publisher, follower):
                    return
        except BusError as error:
            # Its next message, a beat at the latest, asks again.
            self.num_failures_total += 1
            log.info("kv_snapshot_failed", publisher=publisher, error=str(error))
        finally:
            self._view.forget(_draft(publisher))
            self._fetching.discard(publisher)
            self._due.set()

    async def _snapshot(self, publisher: str, follower: Follower) -> bool:
        """Whether that publisher is in step now, or gone."""
        reader, draft = SnapshotReader(), _draft(publisher)
        self._view.forget(draft)
        while reader.next_page is not None:
            # What the view could not keep would take time to read, and a busy store is caught up with only
            # while few of its events wait.
            question = KvSnapshot(page=reader.next_page, max_names=self._view.max_names)
            page = await self._bus.request(question, to=publisher, timeout_seconds=SNAPSHOT_SECONDS)
            if self._followers.get(publisher) is not follower:
                return True
            for stored in reader.read(page):
                self._view.fill(draft, stored)
        events = (
            follower.catch_up(reader.sequence) if reader.is_whole and reader.sequence is not None else None
        )
        if events is None:
            return False
        for event in events:
            self._view.apply(draft, event)
        self._view.replace(publisher, draft)
        self.num_snapshots_total += 1
        return True


def _draft(publisher: str) -> str:
    """Under which a snapshot is gathered until it is whole. No incarnation has a slash."""
    return f"{publisher}/draft"
