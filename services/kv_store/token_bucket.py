"""Holds what is sent to a rate. Pure but for the clock that its caller brings."""


class TokenBucket:
    """`bytes_per_second` on average; 0 lets everything through."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def take(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before these may be sent, after all that was taken before."""
        if self._bytes_per_second <= 0:
            return 0.0
        wait = max(0.0, self._free_at - now)
        self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
        return wait
