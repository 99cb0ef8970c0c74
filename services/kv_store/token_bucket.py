"""Holds what is sent to a rate. Pure but for the clock that its caller brings."""


class TokenBucket:
    """`bytes_per_second` on average; 0 lets everything through."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """When a line of this rate would have carried these, after all that was taken before; `now` where
        there is no limit."""
        if self._bytes_per_second <= 0:
            return now
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
        return self._free_at
