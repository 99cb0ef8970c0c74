"""The KV memory of one worker: one arena, cut into blocks, each block into slots.

Block-major, `[num_blocks, num_slots, 2, block_size, head_dim]`, one slot for each (layer, KV head) that
lives here. When layers or heads leave, blocks get fewer slots and the same bytes become more blocks. What
other instances' modules need is given up at the arena's end.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from libs.engine.errors import OutOfBlocks
from libs.engine.memory.arena import Arena, Region


class SlotRows:
    """Blocks by their slots, for copies of some slots of one block at a time.

    On the CPU through numpy, which copies a slot as one run of bytes: twice as fast as torch's index kernels,
    which go element by element. `blocks` is contiguous, `[num_blocks, slots, 2, block_size, head_dim]`; it is
    written in place.
    """

    def __init__(self, blocks: torch.Tensor) -> None:
        self._torch = blocks
        self._bytes: NDArray[np.uint8] | None = None
        self._zeros = np.empty((0, 0), dtype=np.uint8)
        if blocks.device.type == "cpu":
            self._bytes = blocks.flatten(2).view(torch.uint8).numpy()

    def copy(
        self,
        block: int,
        slots: NDArray[np.int64],
        source: "SlotRows",
        theirs: int,
        their_slots: NDArray[np.int64],
    ) -> None:
        """Slots of a block get what other slots of another block hold; source and target may overlap."""
        if self._bytes is not None and source._bytes is not None:
            self._bytes[block][slots] = source._bytes[theirs][their_slots]
            return
        device = self._torch.device
        picked = source._torch[theirs][torch.from_numpy(their_slots).to(source._torch.device)]
        self._torch[block][torch.from_numpy(slots).to(device)] = picked.to(device)

    def clear(self, block: int, slots: NDArray[np.int64]) -> None:
        """Zeros slots of a block."""
        if self._bytes is not None:
            if len(self._zeros) != len(slots):  # rows to copy are faster to write than a scalar
                self._zeros = np.zeros((len(slots), self._bytes.shape[2]), dtype=np.uint8)
            self._bytes[block][slots] = self._zeros
        else:
            self._torch[block][torch.from_numpy(slots).to(self._torch.device)] = 0


@dataclass(frozen=True)
class BlockLayout:
    """What one block holds: the slots in order, each `[2, block_size, head_dim]` of `dtype`."""

    slots: tuple[tuple[int, int], ...]
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def slot_elements(self) -> int:
        """Elements of one slot: keys and values of `block_size` tokens of one head."""
        return 2 * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all slots."""
        return max(1, len(self.slots)) * self.slot_elements * self.dtype.itemsize


@dataclass(frozen=True)
class Relayout:
    """What a change of layout did. `moved` maps old to new ids of live blocks that could not stay."""

    num_blocks_before: int
    num_blocks_after: int
    moved: dict[int, int]


class Pool:
    """The arena and its views. Not thread-safe, but for `touch`: the engine's thread owns it.

    `max_bytes` is what it may ever grow to, on the CPU; address space, not memory.
    """

    def __init__(
        self, layout: BlockLayout, num_blocks: int, device: torch.device, *, max_bytes: int = 0
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._arena = Arena(num_blocks * layout.block_bytes, device, max_bytes=max_bytes)
        self._spans = layer_spans(layout)

    @property
    def blocks(self) -> torch.Tensor:
        """All blocks, `[num_blocks, num_slots, 2, block_size, head_dim]`."""
        return shaped(self._arena.memory, self.layout, self.num_blocks)

    @property
    def num_bytes(self) -> int:
        """All memory, also what is given up."""
        return self._arena.num_bytes

    @property
    def num_given_up_bytes(self) -> int:
        """What others have of it."""
        return self._arena.num_given_up_bytes

    def layer(self, layer: int) -> torch.Tensor:
        """KV of one layer's heads that live here, `[num_blocks, heads, 2, block_size, head_dim]`, a view."""
        first, end = self._spans[layer]
        return self.blocks[:, first:end]

    def capacity(self, layout: BlockLayout, *, num_given_up_bytes: int = 0) -> int:
        """Blocks that the pool could have under `layout`, also once so many more bytes were given up."""
        own_bytes = self._arena.own_bytes
        if num_given_up_bytes:
            own_bytes = self._arena.own_bytes_after(num_given_up_bytes)
        return max(0, own_bytes // layout.block_bytes)

    def relayout(
        self, layout: BlockLayout, live: Collection[int], *, num_blocks: int | None = None
    ) -> Relayout:
        """Changes the slots in place. Live blocks keep the content of slots that stay; new slots are zero.

        The pool has `num_blocks` then, or as many as its memory holds, whichever is less. Views taken before
        are void. Raises OutOfBlocks when the live blocks do not fit.
        """
        before, after = self.num_blocks, self._blocks_after(layout, num_blocks)
        if len(live) > after:
            raise OutOfBlocks(
                f"{len(live)} live blocks do not fit into {after} blocks of the new layout; free some"
            )
        moved = self._move_below(after, live)
        ids = sorted(moved.get(block, block) for block in live)
        if layout.slots != self.layout.slots:
            rewrite(self.blocks, shaped(self._arena.memory, layout, after), self.layout, layout, ids)
        self.layout, self.num_blocks, self._spans = layout, after, layer_spans(layout)
        return Relayout(before, after, moved)

    def give_up(self, num_bytes: int) -> Region:
        """Memory behind the pool's blocks for others. Raises NoRoom: `relayout` into fewer blocks first."""
        return self._arena.give_up(num_bytes, self._used_bytes)

    def take_back(self, region: Region) -> None:
        """Others do not need it any more; `relayout` makes blocks of it. Idempotent."""
        self._arena.take_back(region)

    def grow(self, num_bytes: int) -> int:
        """More memory for the pool, of which `relayout` makes blocks; returns how much it got.

        At most up to `max_bytes`, and none where memory is not taken page by page (CUDA). `touch_own`
        after that makes the first use fast.
        """
        return self._arena.grow(num_bytes)

    def shrink(self, num_bytes: int) -> None:
        """Undoes `grow`. Raises NoRoom: `relayout` into fewer blocks first."""
        self._arena.shrink(num_bytes, self._used_bytes)

    def touch_own(self) -> None:
        """Takes the pages of all blocks. Changes no content; from any thread."""
        self._arena.touch(0, self._used_bytes)

    def touch(self, region: Region, num_bytes: int) -> None:
        """Takes the pages of a region's first bytes. Changes no content; from any thread."""
        self._arena.touch(region.first_byte, region.first_byte + num_bytes)

    @property
    def _used_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def _blocks_after(self, layout: BlockLayout, num_blocks: int | None) -> int:
        capacity = self.capacity(layout)
        return capacity if num_blocks is None else min(num_blocks, capacity)

    def _move_below(self, limit: int, live: Collection[int]) -> dict[int, int]:
        """Copies live blocks from ids at or above `limit` to free ids below it, in the layout in force."""
        taken = set(live)
        free = (block for block in range(min(limit, self.num_blocks)) if block not in taken)
        moved = {block: next(free) for block in sorted(live) if block >= limit}
        blocks = self.blocks
        for source, target in moved.items():
            blocks[target] = blocks[source]
        return moved


def shaped(memory: torch.Tensor, layout: BlockLayout, num_blocks: int) -> torch.Tensor:
    """The first bytes of `memory`, uint8, as blocks `[num_blocks, num_slots, 2, block_size, head_dim]`."""
    shape = (num_blocks, len(layout.slots), 2, layout.block_size, layout.head_dim)
    num_bytes = num_blocks * len(layout.slots) * layout.slot_elements * layout.dtype.itemsize
    return memory[:num_bytes].view(layout.dtype).view(shape)


def layer_spans(layout: BlockLayout) -> dict[int, tuple[int, int]]:
    """First and end slot of each layer."""
    spans: dict[int, tuple[int, int]] = {}
    for layer, group in groupby(enumerate(layout.slots), key=lambda pair: pair[1][0]):
        indices = [index for index, _ in group]
        spans[layer] = (indices[0], indices[-1] + 1)
    return spans


def rewrite(
    old: torch.Tensor, new: torch.Tensor, before: BlockLayout, after: BlockLayout, ids: list[int]
) -> None:
    """Moves blocks from their old place in the memory to their new one.

    Smaller blocks move towards the front, so ascending order overwrites only what was read; larger ones the
    other way round. Of one block, source and target may overlap: a copy keeps them apart.
    """
    place = {slot: index for index, slot in enumerate(before.slots)}
    kept = [(index, place[slot]) for index, slot in enumerate(after.slots) if slot in place]
    targets = np.array([index for index, _ in kept], dtype=np.int64)
    sources = np.array([index for _, index in kept], dtype=np.int64)
    new_slots = [index for index, slot in enumerate(after.slots) if slot not in place]
    fresh = np.array(new_slots, dtype=np.int64)
    old_rows, new_rows = SlotRows(old), SlotRows(new)
    for block in ids if len(after.slots) <= len(before.slots) else reversed(ids):
        if len(targets):
            new_rows.copy(block, targets, old_rows, block, sources)
        if len(fresh):
            new_rows.clear(block, fresh)
