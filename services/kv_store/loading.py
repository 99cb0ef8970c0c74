"""Brings blocks from disk into memory, layer group by layer group, so that who waits for them can send the
first layers while the others are still being read."""

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from libs.kv.block_tree import MEMORY
from libs.kv.layer_groups import layer_groups
from services.kv_store.disk.blocks import BlockToRead
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.held_blocks import HeldBlocks, Nodes
from services.kv_store.slab import Bytes, Shape, Slots

LOADING_SHARE = 0.25
"""Of memory: what may be on its way into it for nobody but a question."""


class Load:
    """Blocks of one shape on their way into `slots`."""

    def __init__(self, nodes: Nodes, slots: Slots, shape: Shape) -> None:
        self.nodes, self.slots, self.shape = nodes, slots, shape
        self.is_lost = np.zeros(nodes.size, dtype=np.bool_)
        self.num_layers = 0
        """Layers that are there."""
        self._changed = asyncio.Event()

    def tell(self, num_layers: int) -> None:
        """So many layers are there now, of the blocks that are not lost."""
        self.num_layers = num_layers
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, num_layers: int) -> None:
        """Returns when the first `num_layers` are there."""
        while self.num_layers < num_layers:
            await self._changed.wait()


class Loader:
    """All loads under way. `spawn` runs one in the background."""

    def __init__(
        self,
        blocks: HeldBlocks,
        disk: DiskTier,
        spawn: Callable[[Load], None],
        on_promoted: Callable[[int], None],
    ) -> None:
        self._blocks, self._disk, self._spawn, self._on_promoted = blocks, disk, spawn, on_promoted
        self._loads: dict[int, tuple[Load, int]] = {}
        self._num_bytes = 0

    @property
    def num_loading(self) -> int:
        """Blocks on their way into memory."""
        return len(self._loads)

    def load_of(self, node: int) -> tuple[Load, int] | None:
        """The load that brings this block, and the block's number in it."""
        return self._loads.get(node)

    def prefetch(self, nodes: Nodes, now: float) -> None:
        """Begin to load those that lie on disk alone, as far as there is room without harm to others."""
        blocks = self._blocks
        wanted = self._wanted(nodes)
        if not wanted.size:
            return
        shape = blocks.shape_of(int(wanted[0]))
        room = int(blocks.slab.budget_bytes * LOADING_SHARE) - self._num_bytes
        self._begin(wanted[: max(0, room // (shape[0] * shape[1]))], now, spares_leased=True)

    def load(self, nodes: Nodes, now: float) -> bool:
        """Begin to load those that lie on disk alone; False where there is no room for them."""
        wanted = self._wanted(nodes)
        return self._begin(wanted, now, spares_leased=False) if wanted.size else True

    async def run(self, load: Load) -> None:
        """Read all layers; then the blocks lie in memory."""
        blocks = self._blocks
        num_layers, layer_bytes = load.shape
        try:
            for layers in layer_groups(num_layers, layer_bytes * load.nodes.size):
                await self._read(load, layers)
                load.tell(layers.stop)
        finally:
            is_whole = load.num_layers == num_layers
            is_placed = ~load.is_lost & is_whole
            for node in load.nodes.tolist():
                del self._loads[node]
            self._num_bytes -= load.nodes.size * num_layers * layer_bytes
            blocks.place(load.nodes[is_placed], load.slots[is_placed])
            blocks.slab.free(load.slots[~is_placed])
            self._on_promoted(int(is_placed.sum()))
            load.is_lost |= not is_whole
            load.tell(num_layers)
            blocks.end_fetch(load.nodes)

    def _wanted(self, nodes: Nodes) -> Nodes:
        on_disk = nodes[~self._blocks.tree.are_in(nodes, MEMORY)]
        if not on_disk.size:
            return on_disk
        is_wanted = self._blocks.tree.shape[on_disk] == self._blocks.tree.shape[on_disk[0]]
        once = dict.fromkeys(on_disk[is_wanted].tolist())
        fresh = [node for node in once if node not in self._loads]
        return np.array(fresh, dtype=np.int64)

    def _begin(self, nodes: Nodes, now: float, *, spares_leased: bool) -> bool:
        blocks = self._blocks
        if not nodes.size:
            return False
        shape = blocks.shape_of(int(nodes[0]))
        # Pinned first: what is about to be loaded must not go for the room it needs.
        blocks.tree.begin_reading(nodes)
        slots = blocks.make_room(nodes.size, shape, now, spares_leased=spares_leased)
        if slots is None:
            blocks.end_fetch(nodes)
            return False
        load = Load(nodes, slots, shape)
        for index, node in enumerate(nodes.tolist()):
            self._loads[node] = load, index
        self._num_bytes += nodes.size * shape[0] * shape[1]
        self._spawn(load)
        return True

    async def _read(self, load: Load, layers: range) -> None:
        blocks = self._blocks
        alive = np.flatnonzero(~load.is_lost)
        if not alive.size:
            return
        wanted: list[BlockToRead] = []
        names = blocks.tree.names_of(load.nodes[alive])
        for piece in blocks.slab.pieces(load.slots[alive], layers):
            for row in range(piece.checksums.shape[1]):
                into = [piece.data[layer, row] for layer in range(len(layers))]
                wanted.append(BlockToRead(names[piece.first + row], into, piece.checksums[:, row]))
        results = await self._disk.read(wanted, layers)
        for index, is_read in zip(alive.tolist(), results, strict=True):
            if not is_read:
                load.is_lost[index] = True
                blocks.lose(int(load.nodes[index]))
        # A lost block takes along what follows it.
        load.is_lost |= ~blocks.tree.are_held(load.nodes)


async def read_through(
    disk: DiskTier, blocks: HeldBlocks, nodes: Nodes, layers: range, into: Bytes, at: Nodes
) -> NDArray[np.uint64] | None:
    """Layers of blocks that find no place in memory, to `into` [num_layers, ..., layer_bytes], block by block
    to the columns `at`. Returns their checksums [num_layers, num_nodes]; None where a block is lost."""
    checksums = np.zeros((len(layers), nodes.size), dtype=np.uint64)
    wanted = [
        BlockToRead(name, list(into[:, column]), checksums[:, index])
        for index, (name, column) in enumerate(zip(blocks.tree.names_of(nodes), at.tolist(), strict=True))
    ]
    results = await disk.read(wanted, layers)
    for node, is_read in zip(nodes.tolist(), results, strict=True):
        if not is_read:
            blocks.lose(node)
    return checksums if all(results) else None
