"""Which requests a worker took in lately, for its load reports: routers stop counting those. Pure."""

from collections import deque

KEPT_SECONDS = 2.0
"""Several reports: one may be lost."""
MAX_KEPT = 512


class RecentRequests:
    """Request ids with the time they were taken in; the oldest go first."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, str]] = deque(maxlen=MAX_KEPT)

    def add(self, request_id: str, now: float) -> None:
        """This one is counted in the worker's figures from now on."""
        self._taken.append((now, request_id))

    def ids(self, now: float) -> tuple[str, ...]:
        """Those of the last seconds."""
        while self._taken and self._taken[0][0] + KEPT_SECONDS < now:
            self._taken.popleft()
        return tuple(request_id for _, request_id in self._taken)
