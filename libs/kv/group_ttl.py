"""How long unused blocks are kept, by group: a group is the subtree under one named block. Pure.

A block belongs to its nearest ancestor, or itself, that has a TTL of its own; else to the rest. Where it
belongs is worked out when it is first asked for, and again after new TTLs.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from libs.kv.block_forest import NO_NODE
from libs.kv.block_tree import NO_GROUP, BlockTree

REST: Final = 0
MAX_UNKNOWN = 2000
"""Blocks whose group is worked out in one sweep: a bound on its time."""


class GroupTtl:
    """The TTLs of one store. Seconds; None keeps blocks until they are evicted."""

    def __init__(self, tree: BlockTree, rest_ttl_seconds: float | None) -> None:
        self._tree = tree
        self.epoch: int | None = None
        """Of what was accepted last."""
        self._names: tuple[bytes, ...] = ()
        self._numbers: dict[bytes, int] = {}
        self._seconds = _as_array(rest_ttl_seconds, ())
        self._next = 0

    @property
    def is_endless(self) -> bool:
        """Nothing expires."""
        return bool(np.all(np.isinf(self._seconds)))

    def accept(self, epoch: int, rest_ttl_seconds: float | None, ttl_seconds: Mapping[bytes, float]) -> bool:
        """Replace all TTLs if this epoch is newer. False: it is not, and nothing changed."""
        if self.epoch is not None and epoch <= self.epoch:
            return False
        self.epoch = epoch
        self._names = tuple(ttl_seconds)
        self._numbers = {name: number for number, name in enumerate(ttl_seconds, start=REST + 1)}
        self._seconds = _as_array(rest_ttl_seconds, tuple(ttl_seconds.values()))
        self._tree.group[: self._tree.num_nodes] = NO_GROUP
        return True

    def group_of(self, node: int) -> int:
        """Number of the block's group; REST for none."""
        tree, path, group = self._tree, list[int](), NO_GROUP
        while group == NO_GROUP:
            if node == NO_NODE:
                group = REST
            elif (known := int(tree.group[node])) != NO_GROUP:
                group = known
            else:
                path.append(node)
                group = self._numbers.get(tree.name_of(node), NO_GROUP)
                node = tree.parent_of(node)
        tree.group[path] = group
        return group

    def group_name_of(self, node: int) -> bytes:
        """Of the block whose subtree has its own TTL; b"" for the rest."""
        group = self.group_of(node)
        return b"" if group == REST else self._names[group - REST - 1]

    def ttl_of(self, node: int) -> float:
        """Seconds; inf for ever."""
        return float(self._seconds[self.group_of(node)])

    def sweep(self, now: float, max_nodes: int) -> list[int]:
        """The next `max_nodes` numbers of the tree, gone through in a circle: those unused for too long."""
        tree = self._tree
        if self._next >= tree.num_nodes:
            self._next = 0
        nodes = np.arange(self._next, min(self._next + max_nodes, tree.num_nodes), dtype=np.int64)
        unknown = nodes[tree.group[nodes] == NO_GROUP]
        if unknown.size > MAX_UNKNOWN:
            nodes, unknown = nodes[nodes <= unknown[MAX_UNKNOWN - 1]], unknown[:MAX_UNKNOWN]
        for node in unknown.tolist():
            self.group_of(node)
        self._next += nodes.size
        is_old = tree.last_use[nodes] + self._seconds[tree.group[nodes]] < now
        return [int(node) for node in nodes[is_old & tree.are_held(nodes)]]

    def expired_chain(self, node: int, now: float) -> list[int]:
        """This block and what is above it, as far as it has expired, nobody counts on it and nothing else
        hangs from it: the blocks to drop, in this order."""
        tree, chain = self._tree, list[int]()
        while node != NO_NODE and self._may_expire(node, now) and tree.num_children[node] == bool(chain):
            chain.append(node)
            node = tree.parent_of(node)
        return chain

    def _may_expire(self, node: int, now: float) -> bool:
        tree = self._tree
        is_free = not tree.num_readers[node] and tree.leased_until[node] <= now
        is_free = is_free and bool(tree.are_held(np.array([node], dtype=np.int64))[0])
        return bool(is_free and tree.last_use[node] + self.ttl_of(node) < now)


def _as_array(rest: float | None, seconds: tuple[float, ...]) -> NDArray[np.float64]:
    return np.array([np.inf if rest is None else rest, *seconds], dtype=np.float64)
