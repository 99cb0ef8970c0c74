"""The KV memory of one worker: one arena, cut into blocks, each block into slots.

Block-major, `[num_blocks, num_slots, 2, block_size, head_dim]`, one slot for each (layer, KV head) that
lives here. When layers or heads leave, blocks get fewer slots and the same bytes become more blocks.
"""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby

import torch

from libs.engine.errors import OutOfBlocks

_CHUNK_BLOCKS = 64  # blocks staged at once while the layout changes: bounds the extra memory


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
    """The arena and its views. Not thread-safe: the engine's thread owns it."""

    def __init__(self, layout: BlockLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        num_elements = num_blocks * layout.block_bytes // layout.dtype.itemsize
        self._arena = torch.empty(num_elements, dtype=layout.dtype, device=device)
        self._arena.zero_()  # the first touch of a page is slow: pay it here, not in a step
        self._layers = self._layer_slots(layout)

    @property
    def blocks(self) -> torch.Tensor:
        """All blocks, `[num_blocks, num_slots, 2, block_size, head_dim]`."""
        return self._shaped(self.layout, self.num_blocks)

    def layer(self, layer: int) -> torch.Tensor:
        """KV of one layer's heads that live here, `[num_blocks, heads, 2, block_size, head_dim]`, a view."""
        first, end = self._layers[layer]
        return self.blocks[:, first:end]

    def capacity(self, layout: BlockLayout) -> int:
        """Blocks that this arena's bytes are under another layout."""
        return self._arena.numel() * layout.dtype.itemsize // layout.block_bytes

    def can_relayout(self, layout: BlockLayout, live: Collection[int]) -> bool:
        """Whether the live blocks fit under `layout`."""
        return len(live) <= self.capacity(layout)

    def relayout(self, layout: BlockLayout, live: Collection[int]) -> Relayout:
        """Changes the slots in place. Live blocks keep the content of slots that stay; new slots are zero.

        Views taken before are void. Raises OutOfBlocks when the live blocks do not fit.
        """
        before, after = self.num_blocks, self.capacity(layout)
        if not self.can_relayout(layout, live):
            raise OutOfBlocks(
                f"{len(live)} live blocks do not fit into {after} blocks of the new layout; free some"
            )
        moved = self._move_below(after, live)
        ids = sorted(moved.get(block, block) for block in live)
        self._rewrite(layout, after, ids)
        self.layout, self.num_blocks, self._layers = layout, after, self._layer_slots(layout)
        return Relayout(before, after, moved)

    def _move_below(self, limit: int, live: Collection[int]) -> dict[int, int]:
        """Copies live blocks from ids at or above `limit` to free ids below it, in the layout in force."""
        taken = set(live)
        free = (block for block in range(min(limit, self.num_blocks)) if block not in taken)
        moved = {block: next(free) for block in sorted(live) if block >= limit}
        blocks = self.blocks
        for source, target in moved.items():
            blocks[target] = blocks[source]
        return moved

    def _rewrite(self, layout: BlockLayout, num_blocks: int, ids: list[int]) -> None:
        """Moves each block from its old place in the arena to its new one.

        Smaller blocks move towards the front, so ascending order overwrites only what was read; larger ones
        the other way round. Within a chunk the copy in `staged` keeps source and target apart.
        """
        old, new = self.blocks, self._shaped(layout, num_blocks)
        place = {slot: index for index, slot in enumerate(self.layout.slots)}
        kept = [(index, place[slot]) for index, slot in enumerate(layout.slots) if slot in place]
        targets, sources = [index for index, _ in kept], [index for _, index in kept]
        chunks = [ids[start : start + _CHUNK_BLOCKS] for start in range(0, len(ids), _CHUNK_BLOCKS)]
        if len(layout.slots) > len(self.layout.slots):
            chunks.reverse()
        for chunk in chunks:
            staged = old[chunk][:, sources]
            fresh = torch.zeros((len(chunk), *new.shape[1:]), dtype=new.dtype, device=new.device)
            fresh[:, targets] = staged
            new[chunk] = fresh

    def _shaped(self, layout: BlockLayout, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, len(layout.slots), 2, layout.block_size, layout.head_dim)
        num_elements = num_blocks * len(layout.slots) * layout.slot_elements
        return self._arena[:num_elements].view(shape)

    @staticmethod
    def _layer_slots(layout: BlockLayout) -> dict[int, tuple[int, int]]:
        """First and end slot of each layer."""
        spans: dict[int, tuple[int, int]] = {}
        for layer, group in groupby(enumerate(layout.slots), key=lambda pair: pair[1][0]):
            indices = [index for index, _ in group]
            spans[layer] = (indices[0], indices[-1] + 1)
        return spans
