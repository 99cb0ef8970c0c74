"""Writes blocks to disk in the background, and removes them: one after the other, so that a block which is
removed and put again ends as it should."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from libs.kv.block_forest import NO_NODE
from libs.kv.block_tree import DISK, MEMORY
from libs.kv.write_policy import (
    WritePolicy,
    is_written_at_the_end,
    is_written_when_hit,
    is_written_when_put,
    num_blocks_to_flush,
)
from services.kv_store.disk.blocks import BlockToWrite
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.held_blocks import HeldBlocks, Nodes
from services.kv_store.slab import Shape

BATCH_BYTES = 8 << 20
BATCH_SHARE = 1 / 16
"""Of memory, at most: what is being written cannot make room for puts."""
MAX_WAITING = 100_000
"""Blocks that wait to be written. What comes when so many do stays in memory alone."""
MAX_LOOKED_AT = 512
"""Blocks looked at in one go for those that should be on disk already."""


class DiskWriter:
    """`run` is its only task; everything else returns at once."""

    def __init__(self, blocks: HeldBlocks, disk: DiskTier, policy: WritePolicy) -> None:
        self._blocks, self._disk = blocks, disk
        self._policy: WritePolicy = policy
        self._batch_bytes = min(BATCH_BYTES, int(blocks.slab.budget_bytes * BATCH_SHARE))
        self._waiting: dict[bytes, int] = {}
        self._removed: deque[bytes] = deque()
        self._sweep: Iterator[list[bytes]] | None = None
        self._is_due = asyncio.Event()
        self._is_idle = asyncio.Event()
        self.num_skipped = 0
        """Blocks that the policy wanted on disk and that were not written: too many waited, no room, or they
        left memory first."""

    @property
    def num_waiting(self) -> int:
        """Blocks to be written."""
        return len(self._waiting)

    def on_put(self, nodes: Nodes) -> None:
        """These are new."""
        if is_written_when_put(self._policy):
            self._offer(nodes.tolist())
        elif nodes.size:
            self._flush_next(self._blocks.shape_of(int(nodes[0])))

    def on_hit(self, nodes: Nodes) -> None:
        """These were asked for."""
        if self._policy == "selective":
            hits = self._blocks.tree.num_hits[nodes].tolist()
            wanted = zip(nodes.tolist(), hits, strict=True)
            self._offer([node for node, num in wanted if is_written_when_hit(self._policy, num)])

    def remove(self, names: Sequence[bytes]) -> None:
        """These have left the tier on disk."""
        self._removed.extend(names)
        self._is_due.set()

    def on_resumed(self) -> None:
        """Writing works again. What came meanwhile is made up for, if memory still has it."""
        if is_written_when_put(self._policy):
            self._sweep = self._blocks.tree.members(MEMORY)
        self._is_due.set()

    async def flush(self) -> None:
        """Returns when nothing waits any more; as the policy says, all that memory alone has goes before."""
        if is_written_at_the_end(self._policy):
            self._sweep = self._blocks.tree.members(MEMORY)
        self._is_idle.clear()
        self._is_due.set()
        await self._is_idle.wait()

    async def run(self) -> NoReturn:
        """For ever."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._has_work():
                await self._remove_all()
                self._sweep_on()
                if not self._disk.is_paused:
                    await self._write_some()
                await asyncio.sleep(0)
            self._is_idle.set()

    def _has_work(self) -> bool:
        can_write = not self._disk.is_paused
        return bool(self._removed or (can_write and (self._waiting or self._sweep is not None)))

    def _sweep_on(self) -> None:
        """Offer the next piece of all that memory has, once the one before is written."""
        if self._sweep is not None and not self._waiting:
            names = next(self._sweep, None)
            if names is None:
                self._sweep = None
            else:
                self._offer([self._blocks.tree.node_of(name) for name in names])

    def _offer(self, nodes: Sequence[int]) -> None:
        """Parents before children."""
        tree = self._blocks.tree
        fresh = [node for node in nodes if tree.is_in(node, MEMORY) and not tree.is_in(node, DISK)]
        room = MAX_WAITING - len(self._waiting)
        self.num_skipped += max(0, len(fresh) - room)
        for node, name in zip(fresh[:room], tree.names_of(fresh[:room]), strict=True):
            self._waiting[name] = node
        if fresh:
            self._is_due.set()

    def _flush_next(self, shape: Shape) -> None:
        """Those that memory will give up next, each after what it hangs from."""
        slab, tree = self._blocks.slab, self._blocks.tree
        num_wanted = num_blocks_to_flush(
            self._policy,
            num_used_bytes=slab.num_used_bytes,
            budget_bytes=slab.budget_bytes,
            block_bytes=shape[0] * shape[1],
        )
        if not num_wanted or self._waiting:
            return
        due: dict[int, None] = {}
        for node in tree.plan_drops(MEMORY, min(num_wanted, MAX_LOOKED_AT), now=float("inf")):
            chain: list[int] = []
            while node != NO_NODE and node not in due and not tree.is_in(node, DISK):
                chain.append(node)
                node = tree.parent_of(node)
            due.update(dict.fromkeys(reversed(chain)))
        self._offer(list(due))

    async def _remove_all(self) -> None:
        if self._removed:
            names = list(self._removed)
            self._removed.clear()
            await self._disk.remove(names)

    async def _write_some(self) -> None:
        blocks, tree = self._blocks, self._blocks.tree
        nodes, shape = self._next_batch()
        if not nodes:
            return
        numbers = np.array(nodes, dtype=np.int64)
        tree.begin_reading(numbers)
        try:
            if not await self._make_room(len(nodes), shape):
                self.num_skipped += len(nodes)
                return
            results = await self._disk.write(self._to_write(numbers, shape))
            is_written = np.array(results, dtype=np.bool_) & tree.are_held(numbers)
            blocks.note_written(numbers[is_written])
            unwanted = numbers[np.array(results, dtype=np.bool_) & ~is_written]
            self._removed.extend(tree.names_of(unwanted))
            if not self._disk.is_paused:
                self.num_skipped += results.count(False)
        finally:
            blocks.end_fetch(numbers)

    def _next_batch(self) -> tuple[list[int], Shape]:
        """The first that wait and are of one shape."""
        tree, nodes, shape = self._blocks.tree, list[int](), (0, 0)
        while self._waiting:
            name, node = next(iter(self._waiting.items()))
            if tree.node_of(name) != node or not tree.is_in(node, MEMORY):
                self.num_skipped += 1
            elif not tree.is_in(node, DISK):
                its = self._blocks.shape_of(node)
                if nodes and (its != shape or (len(nodes) + 1) * its[0] * its[1] > self._batch_bytes):
                    break
                shape = its
                nodes.append(node)
            del self._waiting[name]
        return nodes, shape

    async def _make_room(self, num_blocks: int, shape: Shape) -> bool:
        """Room on disk, for which the blocks that should go first go."""
        while not self._disk.can_write(num_blocks, *shape):
            if self._disk.is_paused or num_blocks * shape[0] * shape[1] > self._disk.cap_bytes // 2:
                return False
            victims = self._blocks.tree.plan_drops(DISK, num_blocks, time.monotonic())
            if not victims:
                return False
            self._blocks.drop(victims, DISK)  # which is told to `remove`
            await self._remove_all()
        return True

    def _to_write(self, nodes: Nodes, shape: Shape) -> list[BlockToWrite]:
        tree, layers = self._blocks.tree, range(shape[0])
        names, to_write = tree.names_of(nodes), list[BlockToWrite]()
        for piece in self._blocks.slab.pieces(tree.slot[nodes], layers):
            for row in range(piece.checksums.shape[1]):
                node = int(nodes[piece.first + row])
                to_write.append(
                    BlockToWrite(
                        names[piece.first + row],
                        tree.parent_name_of(node),
                        [piece.data[layer, row] for layer in layers],
                        piece.checksums[:, row],
                        int(tree.num_hits[node]),
                    )
                )
        return to_write
