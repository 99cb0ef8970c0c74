"""Members that progress together: transfers over one Link, sequences in one decode batch. Pure.

All members advance by the same amount per second, so whoever needs the least further amount ends next, and
neither joining nor leaving changes that order: one heap, and one number for how far all have come.
"""

import heapq
from typing import Generic, TypeVar

M = TypeVar("M")

SLACK = 1e-9
"""Relative: the sums of many small advances are that far off at most."""


class SharedProgress(Generic[M]):
    """Members, how much each still needs, and the speed of all."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int, M]] = []
        self._num_joined = 0
        self._progress = 0.0
        self._speed = 0.0
        self._at_seconds = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def progress(self) -> float:
        """How far a member that was there from the first moment on has come."""
        return self._progress

    def advance(self, now: float) -> None:
        """All go on at the present speed until now."""
        self._progress += (now - self._at_seconds) * self._speed
        self._at_seconds = now

    def join(self, member: M, amount: float) -> None:
        """One more, from the last `advance` on."""
        heapq.heappush(self._ends, (self._progress + amount, self._num_joined, member))
        self._num_joined += 1

    def set_speed(self, amount_per_second: float) -> None:
        """Of each member, from the last `advance` on."""
        self._speed = amount_per_second

    def next_end(self) -> float:
        """When the first member is through; infinity without members or speed."""
        if not self._ends or self._speed <= 0:
            return float("inf")
        return self._at_seconds + max(0.0, self._ends[0][0] - self._progress) / self._speed

    def take_ended(self) -> list[M]:
        """Those that are through by the last `advance`; they leave."""
        ended: list[M] = []
        while self._ends and self._ends[0][0] <= self._progress + SLACK * max(1.0, self._progress):
            ended.append(heapq.heappop(self._ends)[2])
        return ended
