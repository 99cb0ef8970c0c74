"""What a store holds: the tree of both tiers' blocks, and the memory of those that lie in it. Synchronous.

A block is *staged* from the start of its put until all its layers are there; only then it is *held* and can
be found. Others learn of changes by `on_stored` and `on_removed`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libs.bus.messages.kv_events import Tier
from libs.kv.block_forest import NO_NODE
from libs.kv.block_tree import DISK, MEMORY, NO_SLOT, BlockTree
from libs.kv.checksum import block_checksums, checksum_of_blocks
from libs.kv.eviction import EvictionKind
from services.kv_store.slab import Shape, Slab, Slots, Stretch

MAX_SHAPES = 256
MAX_LAYERS = 4096
STAGED_SHARE = 0.5
"""Of memory: puts under way beside others. Who never ends them must not push out everything."""
COPY_BYTES = 2 << 20
"""What is checked and copied before others get their turn."""

TIER_NAMES = {MEMORY: Tier.DRAM, DISK: Tier.DISK}

Nodes = NDArray[np.int64]
Told = Callable[[Tier, Sequence[bytes]], None]


class PutRefused(Exception):
    """This put cannot be taken: no room beside what is kept, or it is not what it announced."""


class LayerCorrupt(PutRefused):
    """A layer's bytes do not match its checksum."""


@dataclass(slots=True, eq=False)
class Put:
    """Blocks on their way in. `fresh` numbers those not held before; the bytes of the others are not kept."""

    names: tuple[bytes, ...]
    parent: bytes
    shape: Shape
    fresh: NDArray[np.int64]
    slots: Slots
    stretches: Sequence[Stretch]
    arrived: set[int] = field(default_factory=set[int])

    @property
    def fresh_names(self) -> list[bytes]:
        """Names of the blocks that are kept."""
        return [self.names[index] for index in self.fresh.tolist()]


@dataclass(frozen=True, slots=True)
class Found:
    """The held prefix of a run."""

    nodes: Nodes
    num_in_memory: int


def nodes_of(numbers: Iterable[int]) -> Nodes:
    """As an array."""
    return np.fromiter(numbers, dtype=np.int64)


def ignore(_tier: Tier, _names: Sequence[bytes]) -> None:
    """Nobody needs to be told."""


class HeldBlocks:
    """Blocks under a budget of memory. `now` is monotonic seconds."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        capacity: int = 1 << 20,
        eviction: EvictionKind = "lru",
        on_stored: Told = ignore,
        on_removed: Told = ignore,
    ) -> None:
        self.tree = BlockTree(capacity, eviction)
        self.slab = Slab(budget_bytes)
        self.shapes: list[Shape] = []
        self.num_evicted = {MEMORY: 0, DISK: 0}
        self._staged: set[bytes] = set()
        self._on_stored, self._on_removed = on_stored, on_removed

    @property
    def num_staged(self) -> int:
        """Blocks whose layers are on their way."""
        return len(self._staged)

    # Finding

    def find(self, names: Sequence[bytes], now: float, lease_seconds: float, *, is_hit: bool = True) -> Found:
        """The held prefix, which is kept for `lease_seconds`. `is_hit`: somebody wants it."""
        nodes = np.array(self.tree.longest_prefix(names), dtype=np.int64)
        self.tree.touch(nodes, now, is_hit=is_hit)
        if lease_seconds > 0:
            self.tree.lease(nodes, now + lease_seconds)
        missing = np.flatnonzero(~self.tree.are_in(nodes, MEMORY))
        return Found(nodes, int(missing[0]) if missing.size else nodes.size)

    def begin_fetch(self, names: Sequence[bytes], now: float) -> Nodes | None:
        """Keep these blocks until `end_fetch`; None: some are missing, or not of one shape."""
        nodes = np.array(self.tree.longest_prefix(names), dtype=np.int64)
        if (
            not names
            or nodes.size < len(names)
            or np.any(self.tree.shape[nodes] != self.tree.shape[nodes[0]])
        ):
            return None
        self.tree.begin_reading(nodes)
        self.tree.touch(nodes, now, is_hit=False)
        return nodes

    def end_fetch(self, nodes: Nodes) -> None:
        """The inverse of `begin_fetch`."""
        self._forget(self.tree.end_reading(nodes))

    def shape_of(self, node: int) -> Shape:
        """Layers of a block, and bytes of each."""
        return self.shapes[int(self.tree.shape[node])]

    def shape_number(self, shape: Shape) -> int:
        """The inverse, for blocks that come. Raises PutRefused where there were too many shapes already."""
        if shape not in self.shapes:
            if len(self.shapes) >= MAX_SHAPES:
                raise PutRefused(f"blocks of {MAX_SHAPES} shapes were here already; restart the store")
            self.shapes.append(shape)
        return self.shapes.index(shape)

    # Putting

    def begin_put(self, names: Sequence[bytes], shape: Shape, now: float, *, parent: bytes = b"") -> Put:
        """Make room. Raises PutRefused, and then holds nothing for it."""
        if len(set(names)) < len(names) or parent in names:
            raise PutRefused("a block that comes twice, or that is its own ancestor")
        known = [node for name in names if (node := self.tree.node_of(name)) != NO_NODE]
        fresh = [i for i, name in enumerate(names) if name not in self.tree and name not in self._staged]
        self._check_put(len(names), len(fresh), shape)
        slots = self.make_room(len(fresh), shape, now, spared=frozenset(known))
        if slots is None:  # The disk has most of what is leased, too, and new blocks nobody has.
            slots = self.make_room(len(fresh), shape, now, spared=frozenset(known), spares_leased=False)
        if slots is None:
            raise PutRefused(f"no room for {len(fresh)} blocks of {shape[0] * shape[1]} bytes")
        if fresh:
            self.shape_number(shape)
        self.tree.touch(known, now, is_hit=False)
        self._staged.update(names[i] for i in fresh)
        numbers = np.array(fresh, dtype=np.int64)
        return Put(tuple(names), parent, shape, numbers, slots, self.slab.stretches(slots, numbers))

    async def put_layers(self, put: Put, layers: range, body: NDArray[np.uint8], checksum: int) -> bool:
        """Take layers of all blocks of a put; True when they were the last: `commit` it then.

        Raises PutRefused; the caller then drops the put.
        """
        num_layers, layer_bytes = put.shape
        expected_bytes = len(layers) * len(put.names) * layer_bytes
        is_due = bool(layers) and layers.start >= 0 and layers.stop <= num_layers
        if not is_due or not put.arrived.isdisjoint(layers) or body.size != expected_bytes:
            raise PutRefused(f"{layers} with {body.size} bytes, expected {expected_bytes}, each layer once")
        put.arrived.update(layers)
        blocks = body.reshape(len(layers), len(put.names), layer_bytes)
        checksums = np.empty(blocks.shape[:2], dtype=np.uint64)
        step = max(1, COPY_BYTES // layer_bytes)
        for row, layer in enumerate(layers):
            for first in range(0, len(put.names), step):
                stop = min(first + step, len(put.names))
                _take(put, layer, first, blocks[row, first:stop], checksums[row, first:stop])
                if body.size > COPY_BYTES:
                    await asyncio.sleep(0)
        if checksum_of_blocks(checksums.reshape(-1)) != checksum:
            raise LayerCorrupt(f"{layers} of {len(put.names)} blocks arrived with another checksum")
        return len(put.arrived) == num_layers

    def commit(self, put: Put, now: float) -> Nodes:
        """All layers are there: the blocks are held from now on. Returns those that are new."""
        names = put.fresh_names
        parents = [put.names[i - 1] if i else put.parent for i in put.fresh.tolist()]
        nodes = np.empty(len(names), dtype=np.int64)
        shape = self.shape_number(put.shape)
        for index, (name, parent) in enumerate(zip(names, parents, strict=True)):
            nodes[index] = node = self.tree.add(name, parent, MEMORY, now)
            self.tree.shape[node], self.tree.slot[node] = shape, put.slots[index]
        self._staged.difference_update(names)
        self._on_stored(Tier.DRAM, names)
        return nodes

    def drop_put(self, put: Put) -> None:
        """This put will not be completed; what arrived of it is forgotten."""
        self._staged.difference_update(put.fresh_names)
        self.slab.free(put.slots)

    # Room

    def make_room(
        self,
        num_blocks: int,
        shape: Shape,
        now: float,
        *,
        spared: frozenset[int] = frozenset(),
        spares_leased: bool = True,
    ) -> Slots | None:
        """Slots, for which the blocks that should go first go. None: too few may go."""
        if num_blocks * shape[0] * shape[1] > self.slab.budget_bytes:
            return None
        while True:
            num_missing = self.slab.num_missing(num_blocks, shape)
            if not num_missing and (slots := self.slab.allocate(num_blocks, shape)) is not None:
                return slots
            # With blocks of several shapes it can take more than are missing until a page is empty.
            num_wanted = max(1, num_missing)
            victims = self.tree.plan_drops(
                MEMORY, num_wanted, now, spared=spared, spares_leased=spares_leased
            )
            if len(victims) < num_wanted:
                return None
            self.drop(victims, MEMORY)

    def drop(self, nodes: Sequence[int], tier: int, *, for_room: bool = True) -> None:
        """Take blocks out of a tier, children first; the bytes of a disk tier are its own affair."""
        names = self.tree.names_of(nodes)
        if tier == MEMORY:
            self._free_slots(nodes)
        for node in nodes:
            self.tree.drop(node, tier, for_room=for_room)
        if for_room:
            self.num_evicted[tier] += len(nodes)
        if names:
            self._on_removed(TIER_NAMES[tier], names)

    def drop_everywhere(self, node: int) -> None:
        """Out of all tiers, not to make room."""
        for tier in (MEMORY, DISK):
            if self.tree.is_in(node, tier):
                self.drop([node], tier, for_room=False)

    def place(self, nodes: Nodes, slots: Slots) -> None:
        """Blocks of the disk tier lie in memory, too, from now on."""
        for node in nodes.tolist():
            self.tree.enter(node, MEMORY)
        self.tree.slot[nodes] = slots
        self._on_stored(Tier.DRAM, self.tree.names_of(nodes))

    def note_written(self, nodes: Nodes) -> None:
        """Blocks in memory lie on disk, too, from now on."""
        for node in nodes.tolist():
            self.tree.enter(node, DISK)
        self._on_stored(Tier.DISK, self.tree.names_of(nodes))

    def lose(self, node: int) -> None:
        """Its bytes are gone from the disk tier: it is lost, with its subtree, unless memory has it."""
        if not self.tree.is_in(node, DISK):
            return
        if self.tree.is_in(node, MEMORY):
            self.drop([node], DISK, for_room=False)
        else:
            self._forget(self.tree.doom(node))

    def condemn(self, node: int) -> int:
        """Its bytes in memory are wrong: it is lost, with its subtree. Returns how many blocks that are."""
        num_before = len(self.tree)
        self._forget(self.tree.doom(node))
        return num_before - len(self.tree)

    # Inside

    def _check_put(self, num_blocks: int, num_fresh: int, shape: Shape) -> None:
        num_layers, layer_bytes = shape
        if not (0 < num_layers <= MAX_LAYERS and layer_bytes > 0 and num_blocks):
            raise PutRefused(f"{num_blocks} blocks of {num_layers} layers of {layer_bytes} bytes")
        staged_bytes = (self.num_staged + num_fresh) * num_layers * layer_bytes
        if num_fresh and self._staged and staged_bytes > self.slab.budget_bytes * STAGED_SHARE:
            raise PutRefused(f"{self.num_staged} blocks are on their way already")
        if num_fresh and shape not in self.shapes and len(self.shapes) >= MAX_SHAPES:
            raise PutRefused(f"blocks of {MAX_SHAPES} shapes were here already; restart the store")
        if self.tree.num_free < num_fresh + len(self._staged):
            raise PutRefused(f"{self.tree.capacity} blocks are held; no room for the names of {num_fresh}")

    def _free_slots(self, nodes: Sequence[int]) -> None:
        numbers = np.asarray(nodes, dtype=np.int64)
        slots = self.tree.slot[numbers]
        self.slab.free(slots[slots != NO_SLOT])
        self.tree.slot[numbers] = NO_SLOT

    def _forget(self, nodes: Sequence[int]) -> None:
        for tier in (MEMORY, DISK):
            if gone := [node for node in nodes if self.tree.is_in(node, tier)]:
                self._on_removed(TIER_NAMES[tier], self.tree.names_of(gone))
        self._free_slots(nodes)
        for node in nodes:
            self.tree.forget(node)


def _take(put: Put, layer: int, first: int, blocks: NDArray[np.uint8], checksums: NDArray[np.uint64]) -> None:
    """Blocks `first`.. of one layer; their checksums are filled in."""
    checksums[:] = block_checksums(blocks.reshape(-1), len(blocks))
    for stretch in put.stretches:
        start = max(first, stretch.first)
        stop = min(first + len(blocks), stretch.first + stretch.num_blocks)
        if start < stop:
            rows = slice(stretch.row + start - stretch.first, stretch.row + stop - stretch.first)
            stretch.data[layer, rows] = blocks[start - first : stop - first]
            stretch.checksums[layer, rows] = checksums[start - first : stop - first]
