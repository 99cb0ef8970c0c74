"""Which blocks a store holds, in which of its two tiers, as a forest of chains. Pure; millions of blocks.

A block is a number, its *node*; what is known of it lies in arrays under that number. A child never
outlives its parent: blocks go from the ends of chains, and a block that is lost takes its subtree along. One
whose parent is unknown here (it lies in another store, or comes later) is a root, and is joined to the parent
when that comes.

Leases keep a block findable for a time; readers keep it, and its memory, until they end.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.kv.block_forest import NO_NODE, BlockForest
from libs.kv.eviction import EvictionKind, EvictionOrder
from libs.kv.names import NAME_BYTES

MEMORY: Final = 1
DISK: Final = 2
TIERS: Final = (MEMORY, DISK)
NO_SLOT: Final = -1
NO_GROUP: Final = -1

Nodes = NDArray[np.int64]


class TreeFull(Exception):
    """As many blocks as the tree has numbers for."""


class BlockTree:
    """`capacity` numbers; their arrays take memory only where they are used."""

    def __init__(self, capacity: int, eviction: EvictionKind = "lru") -> None:
        self.capacity = capacity
        # Shards grow one at a time: a single table of millions would stop the world each time it doubles.
        self._shards: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._names = np.zeros((capacity, NAME_BYTES), dtype=np.uint8)
        self._order = {tier: EvictionOrder(eviction, capacity) for tier in TIERS}
        self._forest = BlockForest(capacity)
        self.num_children = self._forest.num_children
        """In any tier."""
        self.num_readers = np.zeros(capacity, dtype=np.int32)
        self.num_hits = np.zeros(capacity, dtype=np.int32)
        self.leased_until = np.zeros(capacity, dtype=np.float64)
        self.last_use = np.zeros(capacity, dtype=np.float64)
        self.slot = np.zeros(capacity, dtype=np.int64)
        """Where it lies in memory, `NO_SLOT` where it does not."""
        self.shape = np.zeros(capacity, dtype=np.int16)
        """The holder's number for its layers and their bytes."""
        self.group = np.zeros(capacity, dtype=np.int32)
        """See libs.kv.group_ttl."""
        self._is_doomed = np.zeros(capacity, dtype=np.bool_)
        self._free: list[int] = []
        self.num_nodes = 0
        """Numbers given out so far, free ones among them."""
        self._num_held = 0

    # What is here

    def __len__(self) -> int:
        return self._num_held

    def __contains__(self, name: bytes) -> bool:
        return name in self._shards[name[0]]

    def node_of(self, name: bytes) -> int:
        """Its number; NO_NODE where it is not held."""
        return self._shards[name[0]].get(name, NO_NODE)

    def longest_prefix(self, names: Sequence[bytes]) -> list[int]:
        """The first blocks of `names`, as far as they are held in any tier."""
        shards, nodes = self._shards, list[int]()
        append = nodes.append
        for name in names:
            node = shards[name[0]].get(name)
            if node is None:
                break
            append(node)
        return nodes

    def name_of(self, node: int) -> bytes:
        """The inverse of `node_of`."""
        return bytes(self._names[node].data)

    def names_of(self, nodes: "Sequence[int] | Nodes") -> list[bytes]:
        """The same for many."""
        joined = self._names[np.asarray(nodes, dtype=np.int64)].tobytes()
        return [joined[at : at + NAME_BYTES] for at in range(0, len(joined), NAME_BYTES)]

    def parent_of(self, node: int) -> int:
        """NO_NODE for a root."""
        return self._forest.parent_of(node)

    def is_in(self, node: int, tier: int) -> bool:
        """Whether the block lies in this tier."""
        return bool(self._order[tier].is_member[node])

    def are_in(self, nodes: Nodes, tier: int) -> NDArray[np.bool_]:
        """The same for many."""
        return self._order[tier].is_member[nodes]

    def are_held(self, nodes: Nodes) -> NDArray[np.bool_]:
        """Whether they can be found: what is lost lives on only for its readers."""
        in_memory, on_disk = (order.is_member[nodes] for order in self._order.values())
        return (in_memory | on_disk) & ~self._is_doomed[nodes]

    def parent_name_of(self, node: int) -> bytes:
        """Also where the parent is not here; b"" at the start of a chain."""
        parent = self.parent_of(node)
        return self._forest.awaited_by(node) if parent == NO_NODE else self.name_of(parent)

    def num_in(self, tier: int) -> int:
        """Blocks in this tier."""
        return self._order[tier].num_members

    def members(self, tier: int, piece: int = 4096) -> Iterator[list[bytes]]:
        """Names of all blocks in a tier, in pieces; the tree may change between them."""
        start = 0
        while start < self.num_nodes:
            stop = min(start + piece, self.num_nodes)
            is_member = self._order[tier].is_member[start:stop] & ~self._is_doomed[start:stop]
            if is_member.any():
                yield self.names_of(np.flatnonzero(is_member) + start)
            start = stop

    def newest(self, tier: int, num_blocks: int) -> Nodes:
        """The blocks of a tier that were used last, the latest first. Of millions that takes tenths of a
        second; a thread may do it while the tree changes."""
        end = self.num_nodes
        age = -self.last_use[:end]
        np.copyto(age, np.inf, where=~self._order[tier].is_member[:end] | self._is_doomed[:end])
        youngest = np.argpartition(age, num_blocks)[:num_blocks] if num_blocks < end else np.arange(end)
        youngest = youngest[np.argsort(age[youngest], kind="stable")]
        return youngest[age[youngest] < np.inf]

    @property
    def num_free(self) -> int:
        """How many more blocks can be held."""
        return len(self._free) + self.capacity - self.num_nodes

    # Coming and using

    def add(self, name: bytes, parent: bytes, tier: int, now: float) -> int:
        """Hold a block in a tier, new or from another tier. `parent` b"" starts a chain. Raises TreeFull."""
        node = self.node_of(name)
        if node == NO_NODE:
            node = self._make(name, now)
            self._join(node, name, parent)
        self.enter(node, tier)
        return node

    def enter(self, node: int, tier: int) -> None:
        """A held block lies in this tier, too, from now on."""
        order = self._order[tier]
        if not order.is_member[node]:
            order.add(node, self.parent_of(node), int(self.num_hits[node]))

    def touch(self, nodes: "Sequence[int] | Nodes", now: float, *, is_hit: bool = True) -> None:
        """They were used."""
        numbers = np.asarray(nodes, dtype=np.int64)
        if is_hit:
            self.num_hits[numbers] += 1
        self.last_use[numbers] = now
        hits = self.num_hits[numbers]
        for order in self._order.values():
            order.touch(numbers, hits)

    def lease(self, nodes: "Sequence[int] | Nodes", until: float) -> None:
        """Keep them findable until then, at least."""
        numbers = np.asarray(nodes, dtype=np.int64)
        self.leased_until[numbers] = np.maximum(self.leased_until[numbers], until)

    def begin_reading(self, nodes: "Sequence[int] | Nodes") -> None:
        """Keep them and their memory until `end_reading` with the same nodes."""
        np.add.at(self.num_readers, np.asarray(nodes, dtype=np.int64), 1)

    def end_reading(self, nodes: "Sequence[int] | Nodes") -> list[int]:
        """The inverse. Returns lost blocks that were kept for their readers only: `forget` each."""
        numbers = np.asarray(nodes, dtype=np.int64)
        np.subtract.at(self.num_readers, numbers, 1)
        ended = numbers[self._is_doomed[numbers] & (self.num_readers[numbers] == 0)]
        return list(dict.fromkeys(ended.tolist()))

    # Going

    def plan_drops(
        self,
        tier: int,
        num_wanted: int,
        now: float,
        *,
        spared: Collection[int] = (),
        spares_leased: bool = True,
    ) -> list[int]:
        """The blocks to drop from this tier, in order; fewer where too few may go. One may go that nobody
        reads and, where it lies nowhere else, that has no lease and no children left. `spares_leased`: a
        leased block stays even where another tier holds it, too. `spared` stay."""
        num_gone: dict[int, int] = {}

        def may_go(node: int) -> bool:
            if node in spared or not self._may_go(node, tier, now, spares_leased):
                return False
            if self._is_elsewhere(node, tier):
                return True
            if self.num_children[node] > num_gone.get(node, 0):
                return False
            parent = self.parent_of(node)
            num_gone[parent] = num_gone.get(parent, 0) + 1
            return True

        return self._order[tier].plan(num_wanted, may_go, self.parent_of)

    def drop(self, node: int, tier: int, *, for_room: bool = True) -> bool:
        """Take it out of a tier. True: it lies nowhere now, and its number is free."""
        self._order[tier].remove(node, self.parent_of(node), for_room=for_room)
        if any(order.is_member[node] for order in self._order.values()):
            return False
        self._unname(node)
        self._release(node)
        return True

    def doom(self, node: int) -> list[int]:
        """It is lost, and its subtree with it: none can be found from now on. Returns those that nobody
        reads, children first: `forget` each. The others come from `end_reading`."""
        subtree = list(self._forest.subtree(node))[::-1]
        for each in subtree:
            self._unname(each)
            self._is_doomed[each] = True
        return [each for each in subtree if not self.num_readers[each]]

    def forget(self, node: int) -> None:
        """Free a doomed block's number. Read what is wanted of it before."""
        for order in self._order.values():
            if order.is_member[node]:
                order.remove(node, self.parent_of(node), for_room=False)
        self._is_doomed[node] = False
        self._release(node)

    # Inside

    def _make(self, name: bytes, now: float) -> int:
        if self._free:
            node = self._free.pop()
        elif self.num_nodes < self.capacity:
            node = self.num_nodes
            self.num_nodes += 1
        else:
            raise TreeFull(f"{self.capacity} blocks are held already")
        self._shards[name[0]][name] = node
        self._names[node] = np.frombuffer(name, dtype=np.uint8)
        self.slot[node], self.group[node] = NO_SLOT, NO_GROUP
        self.num_hits[node], self.leased_until[node], self.last_use[node] = 0, 0.0, now
        self._num_held += 1
        return node

    def _may_go(self, node: int, tier: int, now: float, spares_leased: bool) -> bool:
        if self.num_readers[node] or self._is_doomed[node]:
            return False
        must_lie_somewhere = spares_leased or not self._is_elsewhere(node, tier)
        return not (must_lie_somewhere and self.leased_until[node] > now)

    def _is_elsewhere(self, node: int, tier: int) -> bool:
        return bool(self._order[MEMORY + DISK - tier].is_member[node])

    def _join(self, node: int, name: bytes, parent_name: bytes) -> None:
        """Link a new node, which is in no tier yet, to its parent, and to children that waited for it."""
        parent = self.node_of(parent_name) if parent_name else NO_NODE
        for child in self._forest.join(node, name, parent, parent_name):
            for order in self._order.values():
                if order.is_member[child]:
                    order.link(node)
            self.group[list(self._forest.subtree(child))] = NO_GROUP

    def _unname(self, node: int) -> None:
        name = self.name_of(node)
        shard = self._shards[name[0]]
        if shard.get(name) == node:
            del shard[name]
            self._num_held -= 1

    def _release(self, node: int) -> None:
        self._forest.leave(node)  # only lost blocks that are still read outlive their parents
        for order in self._order.values():
            order.num_children[node] = 0
        self._free.append(node)
