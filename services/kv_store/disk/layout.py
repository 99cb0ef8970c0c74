"""Where a segment's bytes lie. Pure.

Slots stand in stripes. A stripe holds layer 0 of all its blocks, then layer 1, and so on: a layer of blocks
that were written together is one read, and all their layers follow one another.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from services.kv_store.disk.blocks import Shape

MAX_STRIPE_SLOTS = 32
"""As many as a run of a prompt's blocks that one store is given."""

Place = tuple[int, int]
"""Segment and slot."""


class Form(NamedTuple):
    """What a segment is made of; its file's name tells it."""

    num_layers: int
    layer_bytes: int
    stripe_slots: int

    @property
    def shape(self) -> Shape:
        """Layers, and bytes of one block in one layer."""
        return self.num_layers, self.layer_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_layers * self.layer_bytes

    def offset_of(self, slot: int, layer: int) -> int:
        """Where a block's layer begins."""
        stripe, column = divmod(slot, self.stripe_slots)
        return ((stripe * self.num_layers + layer) * self.stripe_slots + column) * self.layer_bytes

    def end_of(self, slot: int) -> int:
        """A file of fewer bytes does not hold this slot whole."""
        return self.offset_of(slot, self.num_layers - 1) + self.layer_bytes


class Spot(NamedTuple):
    """Where one block lies."""

    segment: int
    slot: int
    form: Form


class Extent(NamedTuple):
    """Neighbouring bytes: one layer of these of the spots, by their index, in this order."""

    segment: int
    offset: int
    num_bytes: int
    layer: int
    members: Sequence[int]


def extents_of(spots: Sequence[Spot], layers: range) -> Iterator[Extent]:
    """What to read or write for these layers of all spots, in the files' order."""
    for members in _neighbours(spots):
        number, slot, form = spots[members[0]]
        num_bytes = len(members) * form.layer_bytes
        for layer in layers:
            yield Extent(number, form.offset_of(slot, layer), num_bytes, layer, members)


def _neighbours(spots: Sequence[Spot]) -> list[list[int]]:
    """Indices of spots whose slots follow one another in one stripe."""
    groups: list[list[int]] = []
    expected: Place | None = None
    for index in sorted(range(len(spots)), key=spots.__getitem__):
        number, slot, form = spots[index]
        if (number, slot) == expected and slot % form.stripe_slots:
            groups[-1].append(index)
        else:
            groups.append([index])
        expected = number, slot + 1
    return groups
