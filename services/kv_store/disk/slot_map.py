"""Which slots of which segment are taken. Pure.

A segment is one file of equal slots, one block each. It grows to its capacity, its free slots are taken
again, and when the last block leaves it the file goes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.kv_store.disk.blocks import Shape

Place = tuple[int, int]
"""Segment and slot."""

INDEX_FILES_BYTES = 2 << 20
"""RocksDB's log, manifest and options, together."""


@dataclass(slots=True)
class Segment:
    """`num_slots` is how far the file reaches; `free` are the slots before that which hold nothing."""

    shape: Shape
    capacity: int
    num_slots: int = 0
    free: set[int] = field(default_factory=set[int])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return self.shape[0] * self.shape[1]

    @property
    def num_blocks(self) -> int:
        """Slots that hold one."""
        return self.num_slots - len(self.free)

    @property
    def file_bytes(self) -> int:
        """What the file takes, in whole pages."""
        return -(-self.num_slots * self.slot_bytes // 4096) * 4096


def entry_bytes(shape: Shape) -> int:
    """What the index may need for one block, with room for copies that wait for compaction."""
    return 3 * (120 + 8 * shape[0])


class SlotMap:
    """All segments. The files and the index together stay within `cap_bytes`."""

    def __init__(self, cap_bytes: int, segment_bytes: int, write_buffer_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self._segment_bytes = segment_bytes
        self._index_floor_bytes = INDEX_FILES_BYTES + 8 * write_buffer_bytes
        self.segments: dict[int, Segment] = {}
        # Numbers in the order of their turn: segments with free slots, and such that may still grow.
        self._free_in: dict[Shape, dict[int, None]] = {}
        self._growable: dict[Shape, dict[int, None]] = {}
        self._num_free: dict[Shape, int] = {}
        self._next_segment = 0
        self.num_blocks = 0
        self.num_used_bytes = 0
        self.num_file_bytes = 0
        self._num_entry_bytes = 0
        self.num_index_bytes = 0
        """As last measured."""

    def num_allocatable(self, shape: Shape) -> int:
        """How many blocks of this shape fit beside what is there."""
        entry, free = entry_bytes(shape), self.num_free(shape)
        room_bytes = self.cap_bytes - self.num_charged_bytes
        num_reused = max(0, min(free, room_bytes // entry))
        if num_reused < free:
            return num_reused
        return free + max(0, room_bytes - free * entry) // (entry + shape[0] * shape[1])

    def num_free(self, shape: Shape) -> int:
        """Slots of this shape that can be taken without a file growing."""
        return self._num_free.get(shape, 0)

    @property
    def num_charged_bytes(self) -> int:
        """Segment files and index, the latter as it may become."""
        planned = self._index_floor_bytes + self._num_entry_bytes
        return self.num_file_bytes + max(planned, self.num_index_bytes)

    def allocate(self, num_blocks: int, shape: Shape) -> list[Place]:
        """Places for this many blocks, no more than `num_allocatable`; neighbours where possible."""
        places: list[Place] = []
        while len(places) < num_blocks and (number := self._first(self._free_in, shape)) is not None:
            places += self._reuse(number, num_blocks - len(places))
        while len(places) < num_blocks:
            number = self._first(self._growable, shape)
            number = self._add(shape) if number is None else number
            places += self._grow(number, num_blocks - len(places))
        return places

    def free(self, places: Iterable[Place]) -> list[tuple[int, Shape]]:
        """Give places back; returns the segments that are empty now and no longer known here."""
        emptied: list[tuple[int, Shape]] = []
        for number, slot in places:
            segment = self.segments[number]
            segment.free.add(slot)
            self._num_free[segment.shape] = self.num_free(segment.shape) + 1
            self._free_in.setdefault(segment.shape, {})[number] = None
            self._count(segment, -1)
            if not segment.num_blocks:
                emptied.append((number, segment.shape))
                self.drop(number)
        return emptied

    def restore(self, number: int, shape: Shape, taken: set[int]) -> None:
        """A segment found on disk, with at least one block."""
        num_slots = max(taken) + 1
        segment = Segment(shape, max(self._capacity(shape), num_slots), num_slots)
        segment.free = set(range(num_slots)) - taken
        self.segments[number] = segment
        self.num_file_bytes += segment.file_bytes
        self._count(segment, len(taken))
        self.skip_to(number + 1)
        self._num_free[shape] = self.num_free(shape) + len(segment.free)
        if segment.free:
            self._free_in.setdefault(shape, {})[number] = None
        if segment.num_slots < segment.capacity:
            self._growable.setdefault(shape, {})[number] = None

    def skip_to(self, number: int) -> None:
        """Numbers below this one were used before; a number never names two files."""
        self._next_segment = max(self._next_segment, number)

    def drop(self, number: int) -> None:
        """A segment and all its blocks are gone."""
        segment = self.segments.pop(number)
        self._free_in.get(segment.shape, {}).pop(number, None)
        self._growable.get(segment.shape, {}).pop(number, None)
        self._num_free[segment.shape] = self.num_free(segment.shape) - len(segment.free)
        self._count(segment, -segment.num_blocks)
        self.num_file_bytes -= segment.file_bytes

    def _add(self, shape: Shape) -> int:
        number = self._next_segment
        self._next_segment += 1
        self.segments[number] = Segment(shape, self._capacity(shape))
        self._growable.setdefault(shape, {})[number] = None
        return number

    def _reuse(self, number: int, num_blocks: int) -> list[Place]:
        segment = self.segments[number]
        slots = sorted(segment.free)[:num_blocks]
        segment.free.difference_update(slots)
        self._num_free[segment.shape] -= len(slots)
        self._count(segment, len(slots))
        if not segment.free:
            del self._free_in[segment.shape][number]
        return [(number, slot) for slot in slots]

    def _grow(self, number: int, num_blocks: int) -> list[Place]:
        segment = self.segments[number]
        before_bytes, first = segment.file_bytes, segment.num_slots
        segment.num_slots = min(first + num_blocks, segment.capacity)
        self.num_file_bytes += segment.file_bytes - before_bytes
        self._count(segment, segment.num_slots - first)
        if segment.num_slots == segment.capacity:
            del self._growable[segment.shape][number]
        return [(number, slot) for slot in range(first, segment.num_slots)]

    @staticmethod
    def _first(numbers: dict[Shape, dict[int, None]], shape: Shape) -> int | None:
        return next(iter(numbers.get(shape, ())), None)

    def _count(self, segment: Segment, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self.num_used_bytes += num_blocks * segment.slot_bytes
        self._num_entry_bytes += num_blocks * entry_bytes(segment.shape)

    def _capacity(self, shape: Shape) -> int:
        return max(1, self._segment_bytes // (shape[0] * shape[1]))
