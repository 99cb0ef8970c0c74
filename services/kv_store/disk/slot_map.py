"""Which slots of which segment are taken. Pure.

A segment is one file of equal slots, one block each. It grows by stripes to its capacity, its free slots are
taken again, and when the last block leaves it the file goes.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.kv_store.disk.blocks import Shape
from services.kv_store.disk.layout import MAX_STRIPE_SLOTS, Form, Place

INDEX_FILES_BYTES = 2 << 20
"""RocksDB's log, manifest and options, together."""


@dataclass(slots=True)
class Segment:
    """`num_slots` is how far the file reaches, in whole stripes; `free` are those slots that hold nothing."""

    form: Form
    capacity: int
    num_slots: int = 0
    free: set[int] = field(default_factory=set[int])

    @property
    def num_blocks(self) -> int:
        """Slots that hold one."""
        return self.num_slots - len(self.free)

    @property
    def file_bytes(self) -> int:
        """What the file takes at most, in whole pages."""
        return -(-self.num_slots * self.form.slot_bytes // 4096) * 4096


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
        self._num_free: Counter[Shape] = Counter()
        self._next_segment = 0
        self.num_blocks = 0
        self.num_used_bytes = 0
        self.num_file_bytes = 0
        self._num_entry_bytes = 0
        self.num_index_bytes = 0
        """As last measured."""

    def num_allocatable(self, shape: Shape) -> int:
        """How many blocks of this shape fit beside what is there."""
        entry, free, form = entry_bytes(shape), self._num_free[shape], self._form(shape)
        room_bytes = self.cap_bytes - self.num_charged_bytes
        num_reused = max(0, min(free, room_bytes // entry))
        if num_reused < free:
            return num_reused
        stripe_bytes = form.stripe_slots * (entry + form.slot_bytes)
        return free + max(0, room_bytes - free * entry) // stripe_bytes * form.stripe_slots

    @property
    def num_charged_bytes(self) -> int:
        """Segment files and index, the latter as it may become."""
        planned = self._index_floor_bytes + self._num_entry_bytes
        return self.num_file_bytes + max(planned, self.num_index_bytes)

    def allocate(self, num_blocks: int, shape: Shape) -> list[Place]:
        """Places for this many blocks, no more than `num_allocatable`; neighbours where possible."""
        places: list[Place] = []
        while len(places) < num_blocks:
            number = next(iter(self._free_in.get(shape, ())), None)
            if number is None:
                self._grow(shape)
            else:
                places += self._take(number, num_blocks - len(places))
        return places

    def form_of(self, number: int) -> Form:
        """Of a segment that holds blocks."""
        return self.segments[number].form

    def is_taken(self, place: Place) -> bool:
        """Whether a block lies there."""
        segment = self.segments.get(place[0])
        return segment is not None and place[1] < segment.num_slots and place[1] not in segment.free

    def free(self, places: Iterable[Place]) -> list[tuple[int, Form]]:
        """Give places back; returns the segments that are empty now and no longer known here."""
        emptied: list[tuple[int, Form]] = []
        for number, slot in places:
            segment = self.segments[number]
            self._add_free(number, {slot})
            self._count(segment, -1)
            if not segment.num_blocks:
                emptied.append((number, segment.form))
                self.drop(number)
        return emptied

    def restore(self, number: int, form: Form, taken: set[int]) -> None:
        """A segment found on disk, with at least one block."""
        num_slots = -(-(max(taken) + 1) // form.stripe_slots) * form.stripe_slots
        segment = Segment(form, max(self._capacity(form), num_slots), num_slots)
        self.segments[number] = segment
        self.num_file_bytes += segment.file_bytes
        self._add_free(number, set(range(num_slots)) - taken)
        self._count(segment, len(taken))
        self.skip_to(number + 1)
        if segment.num_slots < segment.capacity and form == self._form(form.shape):
            self._growable.setdefault(form.shape, {})[number] = None

    def skip_to(self, number: int) -> None:
        """Numbers below this one were used before; a number never names two files."""
        self._next_segment = max(self._next_segment, number)

    def drop(self, number: int) -> None:
        """A segment and all its blocks are gone."""
        segment = self.segments.pop(number)
        self._free_in.get(segment.form.shape, {}).pop(number, None)
        self._growable.get(segment.form.shape, {}).pop(number, None)
        self._num_free[segment.form.shape] -= len(segment.free)
        self._count(segment, -segment.num_blocks)
        self.num_file_bytes -= segment.file_bytes

    def _take(self, number: int, num_blocks: int) -> list[Place]:
        """Emptiest stripes first, so that what is written together lies together."""
        segment = self.segments[number]
        stripe_slots, shape = segment.form.stripe_slots, segment.form.shape
        num_free = Counter(slot // stripe_slots for slot in segment.free)
        slots = heapq.nsmallest(
            num_blocks, segment.free, key=lambda slot: (-num_free[slot // stripe_slots], slot)
        )
        segment.free.difference_update(slots)
        self._num_free[shape] -= len(slots)
        self._count(segment, len(slots))
        if not segment.free:
            del self._free_in[shape][number]
        return [(number, slot) for slot in slots]

    def _grow(self, shape: Shape) -> None:
        """One stripe more, in a new segment where none has room."""
        growable = self._growable.setdefault(shape, {})
        number = next(iter(growable), None)
        if number is None:
            number, form = self._next_segment, self._form(shape)
            self._next_segment += 1
            self.segments[number] = Segment(form, self._capacity(form))
            growable[number] = None
        segment = self.segments[number]
        before_bytes, first = segment.file_bytes, segment.num_slots
        segment.num_slots += segment.form.stripe_slots
        self.num_file_bytes += segment.file_bytes - before_bytes
        self._add_free(number, set(range(first, segment.num_slots)))
        if segment.num_slots == segment.capacity:
            del growable[number]

    def _add_free(self, number: int, slots: set[int]) -> None:
        segment = self.segments[number]
        segment.free |= slots
        self._num_free[segment.form.shape] += len(slots)
        if slots:
            self._free_in.setdefault(segment.form.shape, {})[number] = None

    def _count(self, segment: Segment, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self.num_used_bytes += num_blocks * segment.form.slot_bytes
        self._num_entry_bytes += num_blocks * entry_bytes(segment.form.shape)

    def _form(self, shape: Shape) -> Form:
        num_slots = max(1, self._segment_bytes // (shape[0] * shape[1]))
        return Form(*shape, min(MAX_STRIPE_SLOTS, num_slots))

    def _capacity(self, form: Form) -> int:
        num_stripes = self._segment_bytes // (form.slot_bytes * form.stripe_slots)
        return max(1, num_stripes) * form.stripe_slots
