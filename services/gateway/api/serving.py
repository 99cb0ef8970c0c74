"""A request while it is served: how many there may be at once, and its end when the client leaves."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from starlette.types import Receive

from services.gateway.api.errors import Overloaded, Unavailable


class ConcurrencyLimit:
    """Entered by each generating request. `close` refuses all that come later."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_inside = 0
        self._is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_inside(self) -> int:
        """Requests inside now."""
        return self._num_inside

    @property
    def is_closed(self) -> bool:
        """Whether requests are refused from now on."""
        return self._is_closed

    def close(self) -> None:
        """Refuse all requests from now on. Idempotent."""
        self._is_closed = True

    async def wait_empty(self) -> None:
        """Return when no request is inside."""
        await self._empty.wait()

    def __enter__(self) -> None:
        if self._is_closed:
            raise Unavailable("this gateway is shutting down", code="draining", retry_after_seconds=1)
        if self._num_inside >= self._limit:
            raise Overloaded(
                f"{self._limit} requests are in progress here, as many as this gateway takes",
                retry_after_seconds=1,
            )
        self._num_inside += 1
        self._empty.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._empty.set()


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; raise ClientGone, the work being cancelled, if the client leaves first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
    await working


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
