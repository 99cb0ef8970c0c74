"""Bytes per second that several transfers share: a store's Link, a store's disk."""

from collections.abc import Callable
from functools import partial

from libs.simulator.event_loop import Due
from libs.simulator.shared_progress import SharedProgress

Then = Callable[[float], list[Due]]


class Channel:
    """Transfers under way share the rate equally."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a channel needs a rate above zero, got {bytes_per_second} bytes/s")
        self._bytes_per_second = bytes_per_second
        self._transfers: SharedProgress[Then] = SharedProgress()
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, num_bytes: float, then: Then, now: float) -> list[Due]:
        """One more transfer; `then` is called at its end."""
        self._transfers.advance(now)
        self._transfers.join(then, num_bytes)
        return self._share_anew()

    def _share_anew(self) -> list[Due]:
        self._num_changes += 1
        if not len(self._transfers):
            return []
        self._transfers.set_speed(self._bytes_per_second / len(self._transfers))
        return [Due(self._transfers.next_end(), partial(self._ends, self._num_changes))]

    def _ends(self, num_changes: int, now: float) -> list[Due]:
        if num_changes != self._num_changes:
            return []  # others came or went since: it ends at another time
        self._transfers.advance(now)
        ended = self._transfers.take_ended()
        dues = self._share_anew()
        for then in ended:
            dues += then(now)
        return dues
