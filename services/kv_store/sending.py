"""The bytes of one fetch, layer group by layer group, from memory, from what is being loaded, or straight
from disk where memory has no room."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from libs.kv.block_tree import MEMORY, NO_SLOT
from libs.kv.checksum import checksum_of_blocks
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.held_blocks import COPY_BYTES, HeldBlocks, Nodes
from services.kv_store.loading import Load, Loader, read_through
from services.kv_store.slab import Bytes, Piece

NUM_IN_FLIGHT = 3
"""Frames of one fetch that travel while the next is gathered."""
KEPT_BYTES = 16 << 20
"""A send buffer up to this size is kept for the next layers."""


class SendBuffers:
    """One buffer for each frame under way, and one for the next. Fresh memory for each would cost more than
    the copies."""

    def __init__(self) -> None:
        self._buffers: list[Bytes] = [np.empty(0, dtype=np.uint8)] * (NUM_IN_FLIGHT + 1)
        self._next = 0

    def take(self, num_bytes: int) -> Bytes:
        """A buffer; it is written again when all the others have been taken since."""
        if num_bytes > KEPT_BYTES:
            return np.empty(num_bytes, dtype=np.uint8)
        self._next = (self._next + 1) % len(self._buffers)
        if self._buffers[self._next].size < num_bytes:
            self._buffers[self._next] = np.empty(num_bytes, dtype=np.uint8)
        return self._buffers[self._next][:num_bytes]


class FetchSource:
    """Blocks `nodes`, which the caller keeps, in their order."""

    def __init__(
        self, blocks: HeldBlocks, nodes: Nodes, loader: Loader | None, disk: DiskTier | None
    ) -> None:
        self._blocks, self._nodes, self._disk = blocks, nodes, disk
        self.num_layers, self._layer_bytes = blocks.shape_of(int(nodes[0]))
        self._slots = blocks.tree.slot[nodes]
        self._loads: dict[Load, list[int]] = {}
        for at in np.flatnonzero(~blocks.tree.are_in(nodes, MEMORY)).tolist():
            coming = loader.load_of(int(nodes[at])) if loader is not None else None
            if coming is None:
                self._slots[at] = NO_SLOT
            else:
                load, index = coming
                self._slots[at] = load.slots[index]
                self._loads.setdefault(load, []).append(index)
        self._has_slot = self._slots != NO_SLOT

    @property
    def bytes_per_layer(self) -> int:
        """Of all the blocks together."""
        return self._nodes.size * self._layer_bytes

    async def body(self, layers: range, buffers: SendBuffers) -> tuple[Bytes, int] | None:
        """These layers of all blocks, one after another, and their checksum. None: a block is lost."""
        for load, indices in self._loads.items():
            await load.wait(layers.stop)
            if load.is_lost[indices].any():
                return None
        pieces = list(self._blocks.slab.pieces(self._slots, layers)) if self._has_slot.all() else None
        if pieces is not None and len(pieces) == 1 and len(layers) == 1:
            return pieces[0].data.reshape(-1), checksum_of_blocks(pieces[0].checksums.reshape(-1))
        into = buffers.take(len(layers) * self.bytes_per_layer)
        blocks = into.reshape(len(layers), self._nodes.size, self._layer_bytes)
        if pieces is not None:
            checksums = np.empty(blocks.shape[:2], dtype=np.uint64)
            await _gather(pieces, blocks, checksums)
        else:
            read = await self._mixed(layers, blocks)
            if read is None:
                return None
            checksums = read
        return into, checksum_of_blocks(checksums.reshape(-1))

    async def _mixed(self, layers: range, into: Bytes) -> NDArray[np.uint64] | None:
        """Some blocks from memory, the others from disk."""
        checksums = np.empty(into.shape[:2], dtype=np.uint64)
        in_memory, on_disk = np.flatnonzero(self._has_slot), np.flatnonzero(~self._has_slot)
        for piece in self._blocks.slab.pieces(self._slots[in_memory], layers) if in_memory.size else ():
            at = in_memory[piece.first : piece.first + piece.checksums.shape[1]]
            into[:, at], checksums[:, at] = piece.data, piece.checksums
            await asyncio.sleep(0)
        if self._disk is None:
            return None
        read = await read_through(self._disk, self._blocks, self._nodes[on_disk], layers, into, on_disk)
        if read is None:
            return None
        checksums[:, on_disk] = read
        return checksums


async def _gather(pieces: Sequence[Piece], into: Bytes, checksums: NDArray[np.uint64]) -> None:
    num_copied = 0
    for piece in pieces:
        num_rows = piece.checksums.shape[1]
        checksums[:, piece.first : piece.first + num_rows] = piece.checksums
        step = max(1, COPY_BYTES // (into.shape[0] * into.shape[2]))
        for row in range(0, num_rows, step):
            part = piece.data[:, row : row + step]
            into[:, piece.first + row : piece.first + row + part.shape[1]] = part
            num_copied += part.size
            if num_copied >= COPY_BYTES:
                num_copied = 0
                await asyncio.sleep(0)
