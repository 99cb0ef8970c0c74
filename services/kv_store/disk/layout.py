"""Where a segment's bytes lie. Pure.

Slots stand in stripes. A stripe holds layer 0 of all its blocks, then layer 1, and so on: a layer of blocks
that were written together is one read, and all their layers follow one another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from libs.kv.runs import RUN_BLOCKS
from services.kv_store.disk.blocks import Shape

MAX_STRIPE_SLOTS = RUN_BLOCKS
"""What one store is given of a chain lies together."""

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


def neighbours(spots: Sequence[Spot]) -> list[list[int]]:
    """Indices of spots whose slots follow one another in one stripe: each layer of them is one piece."""
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
