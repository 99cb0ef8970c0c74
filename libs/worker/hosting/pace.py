"""How fast a move copies."""

import asyncio
import time

PIECE_BYTES = 4 << 20
"""Copied between two steps, at most."""
_PIECES_PER_SECOND = 4
"""At least, however slow: each keeps the engine for a moment only."""


class Pace:
    """Lets bytes through at a rate; 0: as fast as they go."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = time.monotonic()

    @property
    def piece_bytes(self) -> int:
        """To copy at once."""
        if not self._bytes_per_second:
            return PIECE_BYTES
        return max(1, min(PIECE_BYTES, int(self._bytes_per_second / _PIECES_PER_SECOND)))

    async def passed(self, num_bytes: int) -> None:
        """So many went through: returns when more may."""
        if not self._bytes_per_second:
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
        await asyncio.sleep(self._free_at - now)
