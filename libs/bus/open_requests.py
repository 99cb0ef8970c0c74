"""Requests in flight, by the address that their answer comes to."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from libs.bus.errors import BusError, RequestTimedOut

A = TypeVar("A")


class OpenRequests(Generic[A]):
    """Each waits under a reply address of its own: `prefix` and a number."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[A]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, what: str, timeout_seconds: float, send: Callable[[str], Awaitable[None]]) -> A:
        """Call `send` with the reply address, then wait for the answer. `what` is said when it does not
        come."""
        reply = f"{self.prefix}{next(self._numbers)}"
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting[reply] = future
        try:
            await send(reply)
            async with asyncio.timeout(timeout_seconds):
                return await future
        except TimeoutError:
            raise RequestTimedOut(f"{what} within {timeout_seconds:g} s") from None
        finally:
            del self._waiting[reply]

    def answer(self, reply: str, answer: A) -> None:
        """Ignored when the request has ended."""
        future = self._waiting.get(reply)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, reply: str, error: BusError) -> None:
        """As `answer`."""
        future = self._waiting.get(reply)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: BusError) -> None:
        """No answer will come any more."""
        for reply in self._waiting:
            self.fail(reply, error)
