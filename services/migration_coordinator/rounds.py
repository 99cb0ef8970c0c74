"""The last rounds of the loop, for whoever asks why something moved or stayed."""

from collections import deque
from itertools import islice

import msgspec

from libs.bus.messages.migration import RoundSeen

MAX_ROUNDS = 200
MAX_ANSWER_BYTES = 512 * 1024
"""The broker takes messages of 1 MiB: of large meshes fewer rounds fit."""


class RoundLog:
    """A ring of rounds."""

    def __init__(self) -> None:
        self._rounds: deque[RoundSeen] = deque(maxlen=MAX_ROUNDS)

    def add(self, seen: RoundSeen) -> None:
        """One more; the oldest goes."""
        self._rounds.append(seen)

    def replace_last(self, seen: RoundSeen) -> None:
        """What was ordered is known only after the round."""
        self._rounds[-1] = seen

    def newest_first(self, count: int) -> tuple[RoundSeen, ...]:
        """Up to so many, and as many as an answer holds; one at least."""
        taken: list[RoundSeen] = []
        num_bytes = 0
        for seen in islice(reversed(self._rounds), count):
            num_bytes += len(msgspec.msgpack.encode(seen))
            if taken and num_bytes > MAX_ANSWER_BYTES:
                break
            taken.append(seen)
        return tuple(taken)
