"""Messages on their way from any thread to the one task that sends them, in order."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from libs.transport.memory import Bytes
from libs.transport.port import Link
from libs.worker.hosting.frames import Tensor, encode, pieces
from libs.worker.hosting.messages import Head


class Outgoing:
    """Made on the loop. Above `max_bytes` unsent there is no room: whoever heeds `when_room` waits."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[tuple[bytes, Bytes]] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._await_room: list[Callable[[], None]] = []
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._came = asyncio.Event()

    def put(self, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        """Never waits; what is put after `close` goes nowhere."""
        header, body = encode(head, tensors)
        with self._lock:
            if self._is_closed:
                return
            was_empty = not self._messages
            self._messages.append((header, body))
            self._num_bytes += body.size
        if threading.get_ident() == self._loop_thread:
            self._came.set()
        elif was_empty:  # else the task has been told of the one before
            self._wake()

    def when_room(self, tell: Callable[[], None]) -> None:
        """Calls `tell` once: now if there is room, else when there is, or at `close`. From any thread."""
        with self._lock:
            if self._num_bytes > self._max_bytes and not self._is_closed:
                self._await_room.append(tell)
                return
        tell()

    async def send_all(self, link: Link, timeout_seconds: float) -> NoReturn:
        """Send what comes. Raises LinkError, by which the Link is lost."""
        while True:
            self._came.clear()
            while self._messages:
                header, body = self._messages[0]
                for piece_header, piece in pieces(header, body):
                    await link.send(piece_header, piece, timeout_seconds=timeout_seconds)
                self._sent(body.size)
            await self._came.wait()

    def close(self) -> None:
        """Drop what is unsent; nobody waits any more."""
        with self._lock:
            self._is_closed = True
            self._messages.clear()
            self._num_bytes = 0
        self._tell_room()

    def _sent(self, num_bytes: int) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._messages.popleft()
            self._num_bytes -= num_bytes
        self._tell_room()

    def _tell_room(self) -> None:
        with self._lock:
            if self._num_bytes > self._max_bytes:
                return
            waiting, self._await_room = self._await_room, []
        for tell in waiting:
            tell()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._came.set)
        except RuntimeError:  # the loop has ended, and with it the Link
            self.close()
