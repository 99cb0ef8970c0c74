"""Events that wait for their publication: merged, bounded, numbered. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from libs.bus.messages.kv_events import Cleared, KvEvent, Removed, Stored, Tier
from libs.kv.names import NAME_BYTES

_CLEARED_COST = 1
"""What a Cleared counts as, in names, against the bound."""


class _Verb(Enum):
    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


@dataclass(slots=True)
class _Pending:
    """Changes of one sort in a row, in one tier."""

    verb: _Verb
    tier: Tier
    names: bytearray = field(default_factory=bytearray)
    offset: int = 0
    """Bytes of `names` that were taken already."""


class KvEventLog:
    """Changes in their order. When more than `max_names` wait, all are dropped and a number is skipped, so
    that every follower sees a gap and asks for a snapshot."""

    def __init__(self, max_names: int) -> None:
        if max_names < 1:
            raise ValueError(f"max_names is {max_names}; it must be at least 1")
        self.sequence = 0
        """Of the latest batch taken, or skipped."""
        self.num_overflows_total = 0
        self._max_names = max_names
        self._pending: deque[_Pending] = deque()
        self._num_names = 0
        self._is_due = True

    @property
    def num_waiting_names(self) -> int:
        """Names that were not taken yet."""
        return self._num_names

    @property
    def is_due(self) -> bool:
        """Whether followers do not know all yet: changes wait, or a gap is to be shown."""
        return self._is_due or bool(self._pending)

    def stored(self, tier: Tier, names: Sequence[bytes]) -> None:
        """These blocks are in this tier now."""
        self._add(_Verb.STORED, tier, names)

    def removed(self, tier: Tier, names: Sequence[bytes]) -> None:
        """They are not any more."""
        self._add(_Verb.REMOVED, tier, names)

    def cleared(self, tier: Tier) -> None:
        """Nothing is in this tier any more. What waits about this tier need not be told."""
        self._pending = deque(pending for pending in self._pending if pending.tier is not tier)
        self._num_names = sum(map(_cost, self._pending))
        self._pending.append(_Pending(_Verb.CLEARED, tier))
        self._num_names += _CLEARED_COST
        self._bound()

    def take(self, max_names: int) -> list[KvEvent]:
        """The next batch, of at most `max_names`; its number is `sequence` from now on. An empty one is a
        sign of life: it shows followers whether they have missed anything."""
        events: list[KvEvent] = []
        room = max(1, max_names)
        while self._pending and room > 0:
            first = self._pending[0]
            num_names = min(_cost(first), room)
            events.append(_event(first, num_names))
            first.offset += num_names * NAME_BYTES
            if first.offset >= len(first.names):
                self._pending.popleft()
            room -= num_names
            self._num_names -= num_names
        self.sequence += 1
        self._is_due = False
        return events

    def skip(self) -> None:
        """What was taken may be lost: followers must see a gap."""
        self.sequence += 1
        self._is_due = True

    def _add(self, verb: _Verb, tier: Tier, names: Sequence[bytes]) -> None:
        if not names:
            return
        if not self._pending or (self._pending[-1].verb, self._pending[-1].tier) != (verb, tier):
            self._pending.append(_Pending(verb, tier))
        joined = b"".join(names)
        if len(joined) != len(names) * NAME_BYTES:
            raise ValueError(f"block names take {NAME_BYTES} bytes each; {len(names)} took {len(joined)}")
        self._pending[-1].names += joined
        self._num_names += len(names)
        self._bound()

    def _bound(self) -> None:
        if self._num_names > self._max_names:
            self._pending.clear()
            self._num_names = 0
            self.num_overflows_total += 1
            self.skip()


def _cost(pending: _Pending) -> int:
    if pending.verb is _Verb.CLEARED:
        return _CLEARED_COST
    return (len(pending.names) - pending.offset) // NAME_BYTES


def _event(pending: _Pending, num_names: int) -> KvEvent:
    if pending.verb is _Verb.CLEARED:
        return Cleared(pending.tier)
    names = bytes(pending.names[pending.offset : pending.offset + num_names * NAME_BYTES])
    return Stored(pending.tier, names) if pending.verb is _Verb.STORED else Removed(pending.tier, names)
