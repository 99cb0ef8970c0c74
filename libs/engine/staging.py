"""KV on its way home, until the pool has room for it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch


class Staging:
    """Blocks `[slots, 2, block_size, head_dim]` by id, in a memory beside the pool that doubles as needed."""

    def __init__(self, block: torch.Tensor, num_blocks: int) -> None:
        """`block` has the shape, dtype and device of one; room for `num_blocks`."""
        self._memory = block.new_empty((max(1, num_blocks), *block.shape))
        self._rows: dict[int, int] = {}

    def put(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """KV `[n, slots, 2, block_size, head_dim]`, in place of what was there of these blocks."""
        for block in blocks:
            self._rows.setdefault(block, len(self._rows))
        if len(self._rows) > len(self._memory):
            grown = self._memory.new_empty((2 * len(self._rows), *self._memory.shape[1:]))
            grown[: len(self._memory)] = self._memory
            self._memory = grown
        self._memory[[self._rows[block] for block in blocks]] = kv.to(self._memory.device)

    def rename(self, moved: Mapping[int, int]) -> None:
        """Blocks got other ids. Where one takes the id of another that is not live, the one that moved is
        meant."""
        rows = {block: row for block, row in self._rows.items() if block not in moved}
        self._rows = rows | {moved[block]: row for block, row in self._rows.items() if block in moved}

    def fill(self, pool: torch.Tensor, slots: Sequence[int], live: set[int]) -> None:
        """Copies live blocks into the `slots` of the same blocks of `pool`."""
        blocks = np.array([block for block in self._rows if block in live], dtype=np.int64)
        if not len(blocks):
            return
        rows = torch.tensor([self._rows[int(block)] for block in blocks])
        pool[torch.from_numpy(blocks)[:, None], torch.tensor(slots)[None]] = self._memory[rows]
