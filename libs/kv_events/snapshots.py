"""What a publisher holds, told page by page."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from libs.bus.messages.kv_events import KvSnapshotPage, Stored, Tier
from libs.kv.names import NAME_BYTES

Holdings = Iterable[tuple[Tier, Sequence[bytes]]]
"""All that is held, in parts of any size. It may be made while it is read: between two parts anything may
change, as long as each change is told as an event too."""

TOO_LATE = KvSnapshotPage(sequence=-1, stored=[])
"""Those pages are not kept any more: begin again."""


@dataclass(slots=True)
class _Walk:
    sequence: int
    parts: Iterator[tuple[Tier, bytes]]
    ahead: tuple[Tier, bytes] | None


class SnapshotPages:
    """The walks that followers are in the middle of; the oldest is given up for one too many."""

    def __init__(self, max_names: int, max_walks: int = 8) -> None:
        self._max_bytes, self._max_walks = max(1, max_names) * NAME_BYTES, max_walks
        self._walks: OrderedDict[int, _Walk] = OrderedDict()
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self._walks)

    def begin(self, holdings: Holdings, sequence: int, max_names: int | None = None) -> KvSnapshotPage:
        """The first page. All events up to `sequence` were before the first of `holdings`, of which no more
        than the first `max_names` of each tier are told."""
        parts = _cut(_first(holdings, max_names), self._max_bytes)
        return self._page(_Walk(sequence, parts, next(parts, None)))

    def turn(self, page: int) -> KvSnapshotPage:
        """A later page; each is told once."""
        walk = self._walks.pop(page, None)
        return TOO_LATE if walk is None else self._page(walk)

    def _page(self, walk: _Walk) -> KvSnapshotPage:
        stored: list[Stored] = []
        room = self._max_bytes
        while walk.ahead is not None and len(walk.ahead[1]) <= room:
            stored.append(Stored(*walk.ahead))
            room -= len(walk.ahead[1])
            walk.ahead = next(walk.parts, None)
        return KvSnapshotPage(sequence=walk.sequence, stored=stored, next_page=self._keep(walk))

    def _keep(self, walk: _Walk) -> int:
        if walk.ahead is None:
            return 0
        self._num_pages += 1
        self._walks[self._num_pages] = walk
        while len(self._walks) > self._max_walks:
            self._walks.popitem(last=False)
        return self._num_pages


def _first(holdings: Holdings, max_names: int | None) -> Holdings:
    """As many of each tier."""
    if max_names is None:
        yield from holdings
        return
    room = dict.fromkeys(Tier, max_names)
    for tier, names in holdings:
        yield tier, names[: room[tier]]
        room[tier] -= min(room[tier], len(names))


def _cut(holdings: Holdings, max_bytes: int) -> Iterator[tuple[Tier, bytes]]:
    """Parts of `max_bytes` at most, none of them empty."""
    for tier, names in holdings:
        rest = iter(names)
        while part := b"".join(islice(rest, max_bytes // NAME_BYTES)):
            yield tier, part
