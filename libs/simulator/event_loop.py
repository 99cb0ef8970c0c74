"""The virtual clock: pop what is due first, let it happen, push what that leads to."""

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Due(NamedTuple):
    """Something that happens at a time, and returns what becomes due by it."""

    at_seconds: float
    happens: Callable[[float], "Iterable[Due]"]
    """Called with the time."""


def run_events(first: Iterable[Due]) -> float:
    """Let all happen in order of time, equal times in order of being pushed. Returns the last time.

    Raises ValueError where something is due before the time it comes from.
    """
    heap: list[tuple[float, int, Callable[[float], Iterable[Due]]]] = []
    num_pushed = 0
    now = float("-inf")
    pending: Iterable[Due] = first
    while True:
        for due in pending:
            if not due.at_seconds >= now:
                raise ValueError(f"something is due at {due.at_seconds} s, and it is {now} s already")
            heapq.heappush(heap, (due.at_seconds, num_pushed, due.happens))
            num_pushed += 1
        if not heap:
            return now
        now, _, happens = heapq.heappop(heap)
        pending = happens(now)
