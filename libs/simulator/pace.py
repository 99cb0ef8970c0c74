"""How long a step takes of the busy seconds that it needs, on devices that are shared and apart."""

from typing import NamedTuple


class Pace(NamedTuple):
    """A step that needs `s` busy seconds takes `s * slowdown`, or `s + added_seconds` where that is longer: a
    device that waits for another one saves up its share meanwhile."""

    slowdown: float = 1.0
    added_seconds: float = 0.0
    """On the way to modules that are elsewhere, and back."""

    def wall_seconds(self, busy_seconds: float) -> float:
        """From its begin to its end."""
        return max(busy_seconds * self.slowdown, busy_seconds + self.added_seconds)
