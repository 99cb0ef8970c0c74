"""Memory of the blocks that a store holds: one buffer per block, all its layers, with a checksum per layer.

Buffers are kept for reuse: a first touch of fresh pages costs many times a copy into warm ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.kv.checksum import checksum_of_blocks

Shape = tuple[int, int]
"""Layers, and bytes of one block in one layer."""


@dataclass(frozen=True, slots=True)
class BlockBuffer:
    """One block: `data` [num_layers, layer_bytes], `checksums` [num_layers], xxh3-64 each."""

    data: NDArray[np.uint8]
    checksums: NDArray[np.uint64]

    @property
    def shape(self) -> Shape:
        """Layers, and bytes of one layer."""
        return self.data.shape[0], self.data.shape[1]


class Arena:
    """Buffers by block name. Never more than `budget_bytes` in use and in reserve together."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._num_allocated_bytes = 0
        self._buffers: dict[bytes, BlockBuffer] = {}
        self._spare: list[BlockBuffer] = []

    @property
    def num_allocated_bytes(self) -> int:
        """In use and in reserve."""
        return self._num_allocated_bytes

    def allocate(self, names: Iterable[bytes], shape: Shape) -> None:
        """A buffer for each name. The caller keeps the sum in use within the budget."""
        for name in names:
            self._buffers[name] = self._take(shape)

    def free(self, names: Iterable[bytes]) -> None:
        """Keep these names' buffers for others."""
        self._spare.extend(self._buffers.pop(name) for name in names)

    def shape_of(self, names: Sequence[bytes]) -> Shape | None:
        """The shape that all these blocks share; None where they do not."""
        shapes = {self._buffers[name].shape for name in names}
        return shapes.pop() if len(shapes) == 1 else None

    def write_layer(self, name: bytes, layer: int, block: NDArray[np.uint8], checksum: np.uint64) -> None:
        """Copy one layer of one block in."""
        buffer = self._buffers[name]
        buffer.data[layer] = block
        buffer.checksums[layer] = checksum

    def read_layers(self, names: Sequence[bytes], layers: range) -> tuple[NDArray[np.uint8], int]:
        """Layers of these blocks, one after another, and their checksum as it was when they were put."""
        buffers = [self._buffers[name] for name in names]
        body: NDArray[np.uint8] = np.concatenate([b.data[layer] for layer in layers for b in buffers])
        checksums = np.array([b.checksums[layer] for layer in layers for b in buffers], np.uint64)
        return body, checksum_of_blocks(checksums)

    def _take(self, shape: Shape) -> BlockBuffer:
        for index, buffer in enumerate(self._spare):
            if buffer.shape == shape:
                return self._spare.pop(index)
        num_bytes = shape[0] * shape[1]
        while self._spare and self._num_allocated_bytes + num_bytes > self._budget_bytes:
            self._num_allocated_bytes -= self._spare.pop().data.nbytes
        self._num_allocated_bytes += num_bytes
        return BlockBuffer(np.empty(shape, dtype=np.uint8), np.zeros(shape[0], dtype=np.uint64))
