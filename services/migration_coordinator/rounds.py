"""The last rounds of the loop, for whoever asks why something moved or stayed."""

from collections import deque
from itertools import islice

import msgspec

from libs.balancing.view import RoundReport

MAX_ROUNDS = 200
MAX_ANSWER_BYTES = 512 * 1024
"""The broker takes messages of 1 MiB."""


class RoundLog:
    """A ring of rounds."""

    def __init__(self) -> None:
        self._rounds: deque[RoundReport] = deque(maxlen=MAX_ROUNDS)

    def add(self, report: RoundReport) -> None:
        """One more; the oldest goes."""
        self._rounds.append(report)

    def replace_last(self, report: RoundReport) -> None:
        """What was ordered is known only after the round."""
        self._rounds[-1] = report

    def newest_first(self, count: int) -> tuple[RoundReport, ...]:
        """Up to so many, one at least, and as many as an answer holds: of large meshes fewer fit."""
        taken: list[RoundReport] = []
        num_bytes = 0
        for report in islice(reversed(self._rounds), count):
            num_bytes += len(msgspec.msgpack.encode(report))
            if taken and num_bytes > MAX_ANSWER_BYTES:
                break
            taken.append(report)
        return tuple(taken)
