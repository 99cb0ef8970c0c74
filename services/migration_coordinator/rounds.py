"""The last rounds of the loop, for whoever asks why something moved or stayed."""

from collections import deque
from itertools import islice

from libs.balancing.view import RoundReport
from services.migration_coordinator.answers import that_fit

MAX_ROUNDS = 200


class RoundLog:
    """A ring of rounds."""

    def __init__(self) -> None:
        self._rounds: deque[RoundReport] = deque(maxlen=MAX_ROUNDS)

    def add(self, seen: RoundReport) -> None:
        """One more; the oldest goes."""
        self._rounds.append(seen)

    def replace_last(self, seen: RoundReport) -> None:
        """What was ordered is known only after the round."""
        self._rounds[-1] = seen

    def newest_first(self, count: int) -> tuple[RoundReport, ...]:
        """Up to so many, and as many as an answer holds: of large meshes fewer fit."""
        return that_fit(islice(reversed(self._rounds), count))
