"""How many generating requests may be inside, and whether the door is open at all."""

import asyncio
from types import TracebackType

from services.gateway.api.errors import Overloaded, Unavailable


class Gate:
    """Entered by each generating request. `close` shuts the door; `wait_empty` waits for those inside."""

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
        """Whether nobody is let in any more."""
        return self._is_closed

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._is_closed = True

    async def wait_empty(self) -> None:
        """Return when nobody is inside."""
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
