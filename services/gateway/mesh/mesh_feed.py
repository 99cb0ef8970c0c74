"""The mesh as it changes, for all who look at it: one snapshot at a time, made once for everybody."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import NoReturn

from services.gateway.api.errors import Overloaded, Unavailable

INTERVAL_SECONDS, MIN_GAP_SECONDS = 1.0, 0.1
"""Between two snapshots: where nothing changes, and at the least."""
MAX_VIEWERS = 64


class MeshFeed:
    """Keeps the newest snapshot alone: who is slow misses those in between, and nothing piles up."""

    def __init__(self, snapshot: Callable[[], bytes], *, max_viewers: int = MAX_VIEWERS) -> None:
        self._snapshot, self._max_viewers = snapshot, max_viewers
        self._num_viewers = 0
        self._watched, self._changed = asyncio.Event(), asyncio.Event()
        self._number, self._latest = 0, b""
        self._came = asyncio.Event()
        self._is_closed = False

    @property
    def num_viewers(self) -> int:
        """Who looks now."""
        return self._num_viewers

    def changed(self) -> None:
        """Something happened that is told before the interval is over. Cheap; call freely."""
        self._changed.set()

    def close(self) -> None:
        """Nothing more comes; viewers are told so. Idempotent."""
        self._is_closed = True
        self._came.set()

    @contextmanager
    def viewer(self) -> Generator[None]:
        """Somebody looks, from here to the end of the block. Raises Overloaded, Unavailable."""
        if self._is_closed:
            raise Unavailable("this gateway is shutting down", code="draining", retry_after_seconds=1)
        if self._num_viewers >= self._max_viewers:
            raise Overloaded(
                f"{self._max_viewers} viewers look at this mesh already, as many as this gateway takes",
                retry_after_seconds=10,
            )
        self._num_viewers += 1
        self._watched.set()
        if not self._latest:
            self._changed.set()
        try:
            yield
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._watched.clear()
                self._latest = b""  # old news by the time that somebody comes

    async def after(self, number: int) -> tuple[int, bytes] | None:
        """The newest snapshot and its number, once that is greater than `number`; None after `close`."""
        while not self._is_closed:
            if self._latest and self._number > number:
                return self._number, self._latest
            await self._came.wait()
        return None

    async def run(self) -> NoReturn:
        """Make snapshots while somebody looks."""
        while True:
            await self._watched.wait()
            self._changed.clear()
            self._publish(self._snapshot())
            await asyncio.sleep(MIN_GAP_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL_SECONDS - MIN_GAP_SECONDS):
                    await self._changed.wait()

    def _publish(self, snapshot: bytes) -> None:
        if self._is_closed:
            return
        self._number, self._latest = self._number + 1, snapshot
        came, self._came = self._came, asyncio.Event()
        came.set()
