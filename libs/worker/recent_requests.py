"""Which requests a worker took in lately, or ended, for its load reports. Pure."""

from collections import deque

KEPT_SECONDS = 2.0
"""Several reports: one may be lost."""
MAX_KEPT = 512


class RecentRequests:
    """Request ids with the time when it happened; the oldest go first."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, str]] = deque(maxlen=MAX_KEPT)

    def add(self, request_id: str, now: float) -> None:
        """It happened to this one just now."""
        self._taken.append((now, request_id))

    def ids(self, now: float) -> tuple[str, ...]:
        """Those of the last seconds."""
        while self._taken and self._taken[0][0] + KEPT_SECONDS < now:
            self._taken.popleft()
        return tuple(request_id for _, request_id in self._taken)
