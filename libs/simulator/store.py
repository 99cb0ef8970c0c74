"""One KV store of the simulated mesh: the live block tree over memory and disk, and its channels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libs.kv.block_tree import DISK, MEMORY, BlockTree
from libs.simulator.channel import Channel
from libs.simulator.event_loop import Due
from libs.simulator.shape import StoreShape

MAX_WRITES = 64
"""Puts whose writing to disk is under way; what comes beyond stays in memory only."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """The first blocks of a run that a store holds."""

    nodes: list[int]
    is_in_memory: list[bool]


class SimulatedStore:
    """Finds, hands out and takes in blocks, and makes room for them."""

    def __init__(self, name: str, shape: StoreShape, block_bytes: int) -> None:
        self.name = name
        self.tree = BlockTree(shape.num_memory_blocks + shape.num_disk_blocks + 1, shape.eviction)
        self.link = Channel(shape.fetch.bytes_per_second)
        disk_rate = shape.fetch.disk_bytes_per_second or shape.fetch.bytes_per_second
        self.disk = Channel(disk_rate)
        """Reads and writes share it."""
        self._shape, self._block_bytes = shape, block_bytes
        self._num_writes = 0

    def find(self, names: Sequence[bytes]) -> HeldBlocks:
        """The longest held prefix of a run; changes nothing."""
        nodes = self.tree.longest_prefix(names)
        is_in_memory = self.tree.are_in(np.asarray(nodes, dtype=np.int64), MEMORY).tolist()
        return HeldBlocks(nodes, is_in_memory)

    def begin_reading(self, nodes: Sequence[int], now: float) -> list[Due]:
        """These are fetched: they count as used, stay until `end_reading`, and come into memory."""
        tree = self.tree
        tree.touch(nodes, now)
        tree.begin_reading(nodes)
        absent = [node for node in nodes if not tree.is_in(node, MEMORY)]
        num_moved = self._make_room(len(absent), now)
        for node in absent[: self._num_free(MEMORY)]:
            tree.add(tree.name_of(node), b"", MEMORY, now)
        dues = self._begin_write(num_moved, now)
        if self._shape.write_policy == "selective":
            dues += self._copy_to_disk([node for node in nodes if tree.num_hits[node] > 1], now)
        return dues

    def end_reading(self, nodes: Sequence[int]) -> None:
        """The inverse of `begin_reading`."""
        self.tree.end_reading(nodes)

    def put(self, names: Sequence[bytes], parent: bytes, now: float) -> list[Due]:
        """Take in the blocks of a run, as many of the first as there is room for."""
        tree = self.tree
        held = tree.longest_prefix(names)
        tree.touch(held, now, is_hit=False)
        tree.begin_reading(held)
        num_moved = self._make_room(len(names) - len(held), now)
        tree.end_reading(held)
        chain = [parent, *names]
        stop = min(len(names), len(held) + self._num_free(MEMORY))
        added = [tree.add(chain[at + 1], chain[at], MEMORY, now) for at in range(len(held), stop)]
        dues = self._begin_write(num_moved, now)
        if self._shape.write_policy == "write_through":
            dues += self._copy_to_disk(added, now)
        return dues

    def _num_free(self, tier: int) -> int:
        room = self._shape.num_memory_blocks if tier == MEMORY else self._shape.num_disk_blocks
        return max(0, room - self.tree.num_in(tier))

    def _make_room(self, num_blocks: int, now: float) -> int:
        """Drop from memory what must go. Returns how many of them the disk holds from now on instead."""
        num_moved = 0
        for node in self.tree.plan_drops(MEMORY, num_blocks - self._num_free(MEMORY), now):
            if (
                self._shape.write_policy == "write_back"
                and not self.tree.is_in(node, DISK)
                and self._room_on_disk(1, now)
            ):
                self.tree.add(self.tree.name_of(node), b"", DISK, now)
                num_moved += 1
            # Its children were to go before it, and may be on disk now.
            if self.tree.can_drop(node, MEMORY, now):
                self.tree.drop(node, MEMORY)
        return num_moved

    def _room_on_disk(self, num_blocks: int, now: float) -> bool:
        """Whether the disk takes so many more, after it dropped what must go for them."""
        if self._num_writes >= MAX_WRITES or num_blocks > self._shape.num_disk_blocks:
            return False
        for node in self.tree.plan_drops(DISK, num_blocks - self._num_free(DISK), now):
            self.tree.drop(node, DISK)
        return self._num_free(DISK) >= num_blocks

    def _copy_to_disk(self, nodes: Sequence[int], now: float) -> list[Due]:
        """Write blocks that are in memory and not on disk."""
        absent = [node for node in nodes if not self.tree.is_in(node, DISK)]
        if not absent or not self._room_on_disk(len(absent), now):
            return []
        for node in absent:
            self.tree.add(self.tree.name_of(node), b"", DISK, now)
        return self._begin_write(len(absent), now)

    def _begin_write(self, num_blocks: int, now: float) -> list[Due]:
        """It takes its share of the disk; the blocks count as held there at once."""
        if not num_blocks:
            return []
        self._num_writes += 1
        return self.disk.begin(num_blocks * self._block_bytes, self._written, now)

    def _written(self, now: float) -> list[Due]:
        del now
        self._num_writes -= 1
        return []
