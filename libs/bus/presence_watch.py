"""A watcher's queue: bounded by the number of keys, because of each key only the latest is kept."""

import asyncio

from libs.bus.message import PresenceEntry


class PresenceWatch:
    """An async iterator over changes. A full state, which may be older than what has come in live meanwhile,
    is told between `begin_filling` and the next one."""

    def __init__(self) -> None:
        self._waiting: dict[str, bytes | None] = {}
        self._heard_live: set[str] = set()
        self._has_news = asyncio.Event()
        self._is_ended = False

    def heard(self, key: str, value: bytes | None) -> None:
        """A put or (None) a delete as it happened."""
        self._heard_live.add(key)
        self._tell(key, value)

    def begin_filling(self) -> None:
        """From now on live changes are newer than what `filled` brings."""
        self._heard_live.clear()

    def filled(self, key: str, value: bytes) -> None:
        """A key of the full state."""
        if key not in self._heard_live:
            self._tell(key, value)

    def end(self) -> None:
        """The iteration stops after what waits."""
        self._is_ended = True
        self._has_news.set()

    def _tell(self, key: str, value: bytes | None) -> None:
        self._waiting.pop(key, None)
        self._waiting[key] = value
        self._has_news.set()

    def __aiter__(self) -> "PresenceWatch":
        return self

    async def __anext__(self) -> PresenceEntry:
        while not self._waiting:
            if self._is_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        key = next(iter(self._waiting))
        return PresenceEntry(key, self._waiting.pop(key))
