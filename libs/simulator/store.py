"""One KV store of the simulated mesh: the live block tree over memory and disk, and its channels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from libs.kv.block_tree import DISK, MEMORY, TIERS, BlockTree
from libs.kv.group_ttl import GroupTtl
from libs.kv.write_policy import is_written_when_hit, is_written_when_put, num_blocks_to_flush
from libs.simulator.channel import Channel
from libs.simulator.event_loop import Due
from libs.simulator.shape import StoreShape

MAX_WRITES = 64
"""Puts whose writing to disk is under way; what comes beyond stays in memory only."""
SWEEP_SECONDS = 1.0


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
        self._ttl = GroupTtl(self.tree, shape.ttl_seconds)
        self._ttl.accept(0, shape.ttl_seconds, shape.group_ttl_seconds)
        self._next_sweep = 0.0

    def find(self, names: Sequence[bytes]) -> HeldBlocks:
        """The longest held prefix of a run; changes nothing: a router looks, too."""
        nodes = self.tree.longest_prefix(names)
        is_in_memory = self.tree.are_in(np.asarray(nodes, dtype=np.int64), MEMORY).tolist()
        return HeldBlocks(nodes, is_in_memory)

    def expire(self, now: float) -> None:
        """Drop what was unused for longer than its group's TTL; looked for now and then, as a store does."""
        if self._ttl.is_endless or now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_SECONDS
        for node in self._ttl.sweep(now, self.tree.capacity):
            for expired in self._ttl.expired_chain(node, now):
                for tier in TIERS:
                    if self.tree.is_in(expired, tier):
                        self.tree.drop(expired, tier, for_room=False)

    def use(self, nodes: Sequence[int], now: float) -> list[Due]:
        """A worker asked for these and was told that they are here."""
        self.tree.touch(nodes, now)
        policy, num_hits = self._shape.write_policy, self.tree.num_hits
        return self._copy_to_disk([n for n in nodes if is_written_when_hit(policy, int(num_hits[n]))], now)

    def begin_reading(self, nodes: Sequence[int], now: float) -> list[Due]:
        """A worker fetches these: they stay until `end_reading`, and come into memory."""
        tree = self.tree
        tree.begin_reading(nodes)
        absent = [node for node in nodes if not tree.is_in(node, MEMORY)]
        self._make_room(MEMORY, len(absent), now)
        for node in absent[: self._num_free(MEMORY)]:
            tree.add(tree.name_of(node), b"", MEMORY, now)
        return self._flush(now)

    def end_reading(self, nodes: Sequence[int]) -> None:
        """The inverse of `begin_reading`."""
        self.tree.end_reading(nodes)

    def put(self, names: Sequence[bytes], parent: bytes, now: float) -> list[Due]:
        """Take in the blocks of a run, as many of the first as there is room for."""
        tree = self.tree
        held = tree.longest_prefix(names)
        tree.touch(held, now, is_hit=False)
        tree.begin_reading(held)
        self._make_room(MEMORY, len(names) - len(held), now)
        tree.end_reading(held)
        chain = [parent, *names]
        stop = min(len(names), len(held) + self._num_free(MEMORY))
        added = [tree.add(chain[at + 1], chain[at], MEMORY, now) for at in range(len(held), stop)]
        written = added if is_written_when_put(self._shape.write_policy) else []
        return self._copy_to_disk(written, now) + self._flush(now)

    def _num_free(self, tier: int) -> int:
        room = self._shape.num_memory_blocks if tier == MEMORY else self._shape.num_disk_blocks
        return max(0, room - self.tree.num_in(tier))

    def _make_room(self, tier: int, num_blocks: int, now: float) -> None:
        """Drop what must go for so many more."""
        for node in self.tree.plan_drops(tier, num_blocks - self._num_free(tier), now):
            self.tree.drop(node, tier)

    def _flush(self, now: float) -> list[Due]:
        """Write what memory will need the place of before long."""
        num_blocks = num_blocks_to_flush(
            self._shape.write_policy,
            num_used_bytes=self.tree.num_in(MEMORY),
            budget_bytes=self._shape.num_memory_blocks,
            block_bytes=1,
        )
        return self._copy_to_disk(self.tree.plan_drops(MEMORY, num_blocks, now), now) if num_blocks else []

    def _copy_to_disk(self, nodes: Sequence[int], now: float) -> list[Due]:
        """Write blocks that are in memory and not on disk, as many as the disk has room for."""
        absent = [node for node in nodes if not self.tree.is_in(node, DISK)]
        if not absent or not self._shape.num_disk_blocks or self._num_writes >= MAX_WRITES:
            return []
        self._make_room(DISK, min(len(absent), self._shape.num_disk_blocks), now)
        written = absent[: self._num_free(DISK)]
        for node in written:
            self.tree.add(self.tree.name_of(node), b"", DISK, now)
        return self._begin_write(len(written), now)

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
