"""KV on its way home, until the pool has room for it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from libs.engine.slot_rows import SlotRows


class Staging:
    """Pieces of blocks as they came, and where in them each block is by its id."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[SlotRows, int]] = {}

    def put(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """Keeps `kv`, `[n, slots, 2, block_size, head_dim]`, in place of what was there of these blocks."""
        piece = SlotRows(kv.contiguous())
        for index, block in enumerate(blocks):
            self._places[block] = piece, index

    def rename(self, moved: Mapping[int, int]) -> None:
        """Blocks got other ids. Where one takes the id of another, that one is not live any more."""
        kept = {block: place for block, place in self._places.items() if block not in moved}
        there = {moved[block]: place for block, place in self._places.items() if block in moved}
        self._places = kept | there

    def fill(self, pool: torch.Tensor, slots: Sequence[int], live: set[int]) -> None:
        """Copies live blocks into the `slots` of the same blocks of `pool`."""
        targets, rows = np.array(slots, dtype=np.int64), SlotRows(pool)
        everything = np.arange(len(slots))
        for block, (piece, index) in self._places.items():
            if block in live:
                rows.copy(block, targets, piece, index, everything)
