"""How long a store that did not answer is left alone. Pure; `now` is monotonic seconds."""

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0


class CircuitBreaker:
    """Each failure in a row doubles the pause, the first success ends it: a store that hangs costs one prompt
    a pause its short timeout, not every prompt."""

    def __init__(self) -> None:
        self._pause_seconds = 0.0
        self._ends_at = 0.0

    def is_due(self, now: float) -> bool:
        """Whether asking is worth its timeout."""
        return now >= self._ends_at

    def failed(self, now: float) -> None:
        """It did not answer in time, or its Link broke."""
        if self.is_due(now):
            self._pause_seconds = min(
                max(2 * self._pause_seconds, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS
            )
            self._ends_at = now + self._pause_seconds

    def succeeded(self) -> None:
        """It answered."""
        self._pause_seconds = self._ends_at = 0.0
