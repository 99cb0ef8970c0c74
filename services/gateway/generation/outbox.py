"""Between the frames that bring tokens and the client that reads them: bounded, one reader."""

import asyncio

from services.gateway.api.errors import ApiError


class SlowClient(ApiError):
    """The client reads more slowly than its answer is made, and the buffer is full."""

    status, type, code = 408, "invalid_request_error", "client_too_slow"


class Outbox:
    """Bytes on their way to one client. Writers never wait: past the bound `overflowed` is set instead."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._came = asyncio.Event()
        self._is_closed = False
        self._error: ApiError | None = None
        self.overflowed = asyncio.Event()

    def put(self, data: bytes) -> None:
        """Append; what comes after the overflow is dropped, because the answer ends with an error then."""
        if self._is_closed or self.overflowed.is_set():
            return
        if self._num_bytes + len(data) > self._max_bytes:
            self.overflowed.set()
            return
        self._parts.append(data)
        self._num_bytes += len(data)
        self._came.set()

    def close(self, error: ApiError | None = None) -> None:
        """Nothing more comes. Idempotent; the first error counts."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
            self._came.set()

    async def take(self) -> bytes:
        """All that lies here, as soon as something does; empty once it is closed and read out.

        Raises the error that it was closed with, after all that came before.
        """
        await self._came.wait()
        data, self._parts, self._num_bytes = b"".join(self._parts), [], 0
        if not self._is_closed:
            self._came.clear()
        if not data and self._error is not None:
            raise self._error
        return data
