"""Following one publisher: which of its events can be applied, and when only a snapshot helps. Pure.

In step, the next number is applied as it comes. Any other number that is new shows a loss: from then on
messages are kept, until a snapshot is there that they can be applied on top of.
"""

from collections.abc import Iterator

from libs.bus.messages.kv_events import Cleared, KvEvent, KvEvents, KvSnapshotPage, Stored
from libs.kv.names import NAME_BYTES

MAX_KEPT_NAMES = 1 << 17
MAX_KEPT_MESSAGES = 1024


class Follower:
    """What was heard of one incarnation of one publisher. Of a new one nothing is known, so it is behind."""

    def __init__(self, max_kept_names: int = MAX_KEPT_NAMES) -> None:
        self._max_kept_names = max_kept_names
        self._sequence: int | None = None
        """Of the last message applied; None: behind."""
        self._kept: dict[int, KvEvents] = {}
        self._num_kept_names = 0

    @property
    def is_behind(self) -> bool:
        """Whether only a snapshot helps."""
        return self._sequence is None

    def hear(self, message: KvEvents) -> list[KvEvent]:
        """What is to be applied now."""
        if self._sequence is not None:
            if message.sequence <= self._sequence:
                return []
            if message.sequence == self._sequence + 1:
                self._sequence = message.sequence
                return message.events
            self._sequence = None
        self._keep(message)
        return []

    def catch_up(self, snapshot_sequence: int) -> list[KvEvent] | None:
        """What to apply on top of a snapshot to be in step again. None: a message in between is lost, or
        could not be kept; the snapshot is of no use, take another."""
        later = sorted(number for number in self._kept if number > snapshot_sequence)
        expected = range(snapshot_sequence + 1, snapshot_sequence + 1 + len(later))
        if later != list(expected):
            self._drop(snapshot_sequence)
            return None
        events = [event for number in later for event in self._kept[number].events]
        self._sequence = snapshot_sequence + len(later)
        self._kept.clear()
        self._num_kept_names = 0
        return events

    def _keep(self, message: KvEvents) -> None:
        if message.sequence in self._kept:
            return
        self._kept[message.sequence] = message
        self._num_kept_names += _num_names(message)
        while self._num_kept_names > self._max_kept_names or len(self._kept) > MAX_KEPT_MESSAGES:
            # A snapshot newer than the lowest number does not need it; an older one finds the gap.
            self._num_kept_names -= _num_names(self._kept.pop(min(self._kept)))

    def _drop(self, up_to: int) -> None:
        for number in [number for number in self._kept if number <= up_to]:
            self._num_kept_names -= _num_names(self._kept.pop(number))


def _num_names(message: KvEvents) -> int:
    return sum(
        0 if isinstance(event, Cleared) else len(event.names) // NAME_BYTES for event in message.events
    )


class SnapshotReader:
    """The pages of one snapshot: which to ask for, and whether they belong together."""

    def __init__(self) -> None:
        self.sequence: int | None = None
        self.next_page: int | None = 0
        """To ask for; None: all are there, or they are of no use."""
        self.is_whole = False

    def read(self, page: KvSnapshotPage) -> Iterator[Stored]:
        """What the page tells."""
        if page.sequence < 0 or self.sequence not in (None, page.sequence):
            self.next_page = None
            return
        self.sequence = page.sequence
        self.next_page = page.next_page or None
        self.is_whole = self.next_page is None
        yield from page.stored
