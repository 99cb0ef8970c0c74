"""Messages on their way from any thread to a Link, in order."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from libs.transport.memory import Bytes
from libs.transport.port import Link, LinkError
from libs.worker.hosting.frames import Tensor, encode, pieces
from libs.worker.hosting.messages import Head


class Outgoing:
    """Made on the Link's loop. Above `max_bytes` unsent there is no room: whoever heeds `when_room` waits.

    What is put on the loop's own thread goes to the Link at once, also while the loop does not run.
    """

    def __init__(self, link: Link, timeout_seconds: float, max_bytes: int = 0) -> None:
        self._link, self._timeout_seconds, self._max_bytes = link, timeout_seconds, max_bytes
        self._messages: deque[tuple[bytes, Bytes]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._await_room: list[Callable[[], None]] = []
        self._is_closed = self._is_posting = False
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()

    def put(self, head: Head, tensors: Sequence[Tensor] = ()) -> bool:
        """Never waits. False after `close`: it goes nowhere."""
        header, body = encode(head, tensors)
        with self._lock:
            if self._is_closed:
                return False
            was_empty = not self._messages
            self._messages.append((header, body))
            self._num_bytes += body.size
        if threading.get_ident() == self._loop_thread:
            self._post_all()
        elif was_empty:  # else the loop has been told of the one before
            self._tell_loop()
        return not self._is_closed

    def when_room(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once: now if there is room, else when there is, or at `close`. From any thread."""
        with self._lock:
            if self._num_bytes > self._max_bytes and not self._is_closed:
                self._await_room.append(tell)
                return
        tell()

    def close(self) -> None:
        """Drop what is unsent; nobody waits any more."""
        with self._lock:
            self._is_closed = True
            self._messages.clear()
            self._num_bytes = 0
        self._tell_room()

    def _post_all(self) -> None:
        if self._is_posting:  # a message in pieces is under way further up: what came goes after it
            return
        self._is_posting = True
        try:
            while (message := self._next()) is not None:
                header, body = message
                parts = list(pieces(header, body))
                for part_header, part in parts[:-1]:
                    self._link.post(part_header, part, _ignore, timeout_seconds=self._timeout_seconds)
                done = partial(self._sent, body.size)
                self._link.post(*parts[-1], done, timeout_seconds=self._timeout_seconds)
        except LinkError:  # it is lost already, or what belongs together cannot be sent whole
            self.close()
            self._closing = self._loop.create_task(self._link.close())
        finally:
            self._is_posting = False

    def _next(self) -> tuple[bytes, Bytes] | None:
        with self._lock:
            return self._messages.popleft() if self._messages else None

    def _sent(self, num_bytes: int, error: LinkError | None) -> None:
        if error is not None:
            return  # who receives on the Link learns of it, and closes this
        with self._lock:
            if not self._is_closed:
                self._num_bytes -= num_bytes
        self._tell_room()

    def _tell_room(self) -> None:
        with self._lock:
            if self._num_bytes > self._max_bytes:
                return
            waiting, self._await_room = self._await_room, []
        for tell in waiting:
            tell()

    def _tell_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._post_all)
        except RuntimeError:  # the loop has ended, and with it the Link
            self.close()


def _ignore(_error: LinkError | None) -> None:
    """The last piece tells of them all."""
