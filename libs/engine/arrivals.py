"""What has come of the KV that is written into a sequence from outside."""

import numpy as np


class Arrivals:
    """Which blocks of which layer were written; `expect` says up to where they will be."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._is_there = np.zeros((num_layers, num_blocks), dtype=bool)
        self._num_missing = np.zeros(num_layers, dtype=np.int64)
        self.end_block = num_blocks

    def add(self, layer: int, first_block: int, end_block: int) -> None:
        """Blocks `first_block <= index < end_block` of a layer are there."""
        there = self._is_there[layer, first_block:end_block]
        self._num_missing[layer] -= np.count_nonzero(~there)
        there[:] = True

    def has(self, layer: int, first_block: int, end_block: int) -> bool:
        """Whether all of these were written."""
        return bool(self._is_there[layer, first_block:end_block].all())

    def expect(self, first_block: int, end_block: int) -> None:
        """Blocks that must be there; those before `first_block` are, those from `end_block` on never come."""
        self.end_block = end_block
        self._num_missing[:] = np.count_nonzero(~self._is_there[:, first_block:end_block], axis=1)
        self._is_there[:, :first_block] = True
        self._is_there[:, end_block:] = True

    def is_whole(self, layer: int) -> bool:
        """Whether every expected block of the layer is there."""
        return not self._num_missing[layer]

    @property
    def num_whole_blocks(self) -> int:
        """So many of the first expected blocks are there in every layer; after `expect`."""
        is_whole = self._is_there[:, : self.end_block].all(axis=0)
        return self.end_block if is_whole.all() else int(is_whole.argmin())

    @property
    def are_complete(self) -> bool:
        """Whether every layer is whole."""
        return not self._num_missing.any()
