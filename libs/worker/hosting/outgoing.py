"""Messages on their way from any thread to the one task that sends them, in order."""

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from libs.transport.memory import Bytes
from libs.transport.port import Link
from libs.worker.hosting.frames import Tensor, encode, pieces
from libs.worker.hosting.messages import Head


class Outgoing:
    """Made on the loop. `max_bytes` bounds what `wait_room` lets callers add."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._messages: deque[tuple[bytes, Bytes]] = deque()
        self._num_bytes = 0
        self._has_room = threading.Condition()
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._came = asyncio.Event()

    def put(self, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        """Never waits; what is put after `close` goes nowhere."""
        header, body = encode(head, tensors)
        with self._has_room:
            if self._is_closed:
                return
            was_empty = not self._messages
            self._messages.append((header, body))
            self._num_bytes += body.size
        if threading.get_ident() == self._loop_thread:
            self._came.set()
        elif was_empty:  # else the task has been told of the one before
            self._wake()

    def wait_room(self, timeout_seconds: float) -> bool:
        """Wait, not on the loop, until less than the bound is unsent. False where that took too long."""
        with self._has_room:
            return self._has_room.wait_for(
                lambda: self._num_bytes <= self._max_bytes or self._is_closed, timeout_seconds
            )

    async def send_all(self, link: Link, timeout_seconds: float) -> NoReturn:
        """Send what comes. Raises LinkError, by which the Link is lost."""
        while True:
            self._came.clear()
            while self._messages:
                header, body = self._messages[0]
                for piece_header, piece in pieces(header, body):
                    await link.send(piece_header, piece, timeout_seconds=timeout_seconds)
                with self._has_room:
                    self._messages.popleft()
                    self._num_bytes -= body.size
                    self._has_room.notify_all()
            await self._came.wait()

    def close(self) -> None:
        """Drop what is unsent; nobody waits any more."""
        with self._has_room:
            self._is_closed = True
            self._messages.clear()
            self._num_bytes = 0
            self._has_room.notify_all()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._came.set)
        except RuntimeError:  # the loop has ended, and with it the Link
            self.close()
