"""Looks again at blocks that a worker found corrupt. The bytes decide, not the worker: a frame may have been
damaged on its way, and a confused worker must be able to throw nothing away."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from libs.bus.messages.store import BlocksCorrupt
from libs.kv.block_forest import NO_NODE
from libs.kv.block_tree import MEMORY
from libs.kv.checksum import checksum
from libs.kv.names import split_names
from services.kv_store.held_blocks import COPY_BYTES, HeldBlocks, Nodes, nodes_of
from services.kv_store.slab import Piece

MAX_WAITING = 64
"""Messages. What comes when so many wait is passed over: the next fetch will tell again."""


class Rechecks:
    """`doubt` takes messages in at once, `run` sees to them one by one."""

    def __init__(self, blocks: HeldBlocks) -> None:
        self._blocks = blocks
        self._waiting: asyncio.Queue[list[bytes]] = asyncio.Queue(MAX_WAITING)
        self.num_right = self.num_dropped = 0
        """Blocks, by the result: nothing wrong, dropped from both tiers with what followed them."""

    def doubt(self, message: BlocksCorrupt) -> None:
        """Look at these soon. Raises ValueError for what are no block hashes."""
        hashes = split_names(message.names)
        if not self._waiting.full():
            self._waiting.put_nowait(hashes)

    async def run(self) -> NoReturn:
        """For ever."""
        while True:
            await self.check(await self._waiting.get())

    async def check(self, hashes: Sequence[bytes]) -> None:
        """Compare those that lie in memory with their checksums, and drop what is wrong. What lies on disk
        alone is compared whenever it is read."""
        tree = self._blocks.tree
        known = dict.fromkeys(tree.node_of(block_hash) for block_hash in hashes)
        nodes = nodes_of(node for node in known if node != NO_NODE and tree.is_in(node, MEMORY))
        tree.begin_reading(nodes)
        try:
            for index in range(nodes.size):
                await self._check_one(nodes[index : index + 1])
        finally:
            self._blocks.end_fetch(nodes)

    async def _check_one(self, node: Nodes) -> None:
        blocks = self._blocks
        num_layers, _ = blocks.shape_of(int(node[0]))
        if not blocks.tree.are_held(node).all():
            return  # It followed one that was wrong.
        (piece,) = blocks.slab.pieces(blocks.tree.slot[node], range(num_layers))
        if await _is_right(piece):
            self.num_right += 1
        elif blocks.tree.are_held(node).all():
            self.num_dropped += blocks.condemn(int(node[0]))


async def _is_right(block: Piece) -> bool:
    step = max(1, COPY_BYTES // block.data.shape[2])
    for first in range(0, len(block.data), step):
        await asyncio.sleep(0)
        for layer in range(first, min(first + step, len(block.data))):
            if checksum(block.data[layer, 0]) != int(block.checksums[layer, 0]):
                return False
    return True
