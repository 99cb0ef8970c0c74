"""A cap on busy seconds per second, so that a worker behaves like a slower device.

A token bucket over measured busy time. What ran is paid afterwards, since nobody knows before how long a
layer takes; so over any window the busy time is at most the share of it, the burst, and the piece that ran
last.
"""

import time
from collections.abc import Callable

_LEAST_DEBT_SECONDS = 1e-6  # no sleep is so short
BURST_SECONDS = 0.25
"""Busy seconds that an idle worker saves up."""


class DeviceShare:
    """`share` of each second, 0 < share <= 1. Owned by one thread."""

    def __init__(
        self,
        share: float,
        *,
        burst_seconds: float = BURST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._burst_seconds = burst_seconds
        self._clock = clock
        self._saved_seconds = burst_seconds
        self._as_of = clock()

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to watch."""
        return self._share >= 1.0

    def spend(self, busy_seconds: float) -> None:
        """The device was busy."""
        if not self.is_whole:
            self._refill()
            self._saved_seconds -= busy_seconds

    def debt_seconds(self) -> float:
        """How long from now nothing may run; 0 where something may."""
        if self.is_whole:
            return 0.0
        self._refill()
        return -self._saved_seconds / self._share if self._saved_seconds < -_LEAST_DEBT_SECONDS else 0.0

    def _refill(self) -> None:
        now = self._clock()
        saved = self._saved_seconds + (now - self._as_of) * self._share
        self._saved_seconds, self._as_of = min(self._burst_seconds, saved), now
