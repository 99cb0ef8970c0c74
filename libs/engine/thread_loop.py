"""The event loop of a thread that mostly computes: turned while the thread sleeps, and in between."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog

_TURN_SECONDS = 0.01
"""A thread that computes on turns its loop this often: a turn costs some 10 us."""
_LATE_ROUNDS = 3
"""What a late turn runs at most: of a handshake each packet takes as many."""
_END_SECONDS = 4.0
"""For what is done at the end; a silent peer is given up before."""
_CANCEL_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class ThreadLoop:
    """Callbacks and tasks of `loop` run in `sleep` and `turn`, on the one thread that calls these. All it
    needs of tasks is that they wait for sockets, timers and each other."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self._turning: int | None = None
        """The thread, while it turns the loop."""
        self._turned_at = 0.0
        self._at_end: list[Callable[[], Awaitable[None]]] = []

    def turn(self) -> None:
        """What is ready now; does not wait. After a while without a turn also some of what that makes ready:
        a handshake needs many rounds, and a thread with long work turns rarely."""
        for _ in range(_LATE_ROUNDS if self._is_due() else 1):
            self.loop.call_soon(self.loop.stop)
            self._run()
        self._turned_at = time.monotonic()

    def turn_if_due(self) -> None:
        """`turn`, unless the last one was only just now."""
        if self._is_due():
            self.turn()

    def sleep(self, timeout_seconds: float | None) -> None:
        """Until `wake`, which may have been called before, or the time is over, or for no reason."""
        timer = None if timeout_seconds is None else self.loop.call_later(timeout_seconds, self.loop.stop)
        self._run()
        self._turned_at = time.monotonic()
        if timer is not None:
            timer.cancel()

    def wake(self) -> None:
        """The thread sleeps no more, or not next time. From any thread; ignored once closed."""
        if self._turning == threading.get_ident():
            self.loop.stop()
            return
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """`close` is done on the loop before it ends, in a bounded time. From any thread."""
        self._at_end.append(close)

    def close(self) -> None:
        """What was given to `at_end`, then the end of all tasks. Nothing can be run on it any more."""
        try:
            if self._at_end:
                self._run_for(self._end_all(), _END_SECONDS)
            if tasks := asyncio.all_tasks(self.loop):
                self._run_for(_cancelled(tasks), _CANCEL_SECONDS)
        finally:
            self.loop.close()

    async def _end_all(self) -> None:
        for close in self._at_end:
            try:
                await close()
            except Exception:  # noqa: BLE001 - the others are to be closed all the same
                _log.exception("not_closed_at_the_end")

    def _run_for(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        task, deadline = self.loop.create_task(work), time.monotonic() + seconds
        task.add_done_callback(lambda _: self.loop.stop())
        while not task.done() and (left := deadline - time.monotonic()) > 0:
            self.sleep(left)

    def _is_due(self) -> bool:
        return time.monotonic() - self._turned_at >= _TURN_SECONDS

    def _run(self) -> None:
        self._turning = threading.get_ident()
        try:
            self.loop.run_forever()
        finally:
            self._turning = None


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
