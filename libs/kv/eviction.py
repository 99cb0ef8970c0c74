"""Which block of a tier goes first: the least recently used, or the least often used with aging. Pure.

A rank only rises while a block lives, so the order is a heap whose entries may lag: an entry that turns out
to be too low is put back at its true rank when it comes up. A touch therefore costs no more than writing a
number. Only blocks without children in the tier are candidates, so a chain goes from its end.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EvictionKind = Literal["lru", "lfu"]
Nodes = NDArray[np.int64]

MAX_SPARED = 2000
"""Candidates passed over in one plan before it is given up: a bound on the time of a hopeless search."""
_NODE_BITS = 32
_NODE_MASK = (1 << _NODE_BITS) - 1


class EvictionOrder:
    """The blocks of one tier by rank. Blocks are numbers below `capacity`."""

    def __init__(self, kind: EvictionKind, capacity: int) -> None:
        self._kind = kind
        self.is_member = np.zeros(capacity, dtype=np.bool_)
        self.num_children = np.zeros(capacity, dtype=np.int32)
        """Children that are in this tier, too."""
        self._rank = np.zeros(capacity, dtype=np.int64)
        self._queued_at = np.zeros(capacity, dtype=np.int64)
        """Rank of the one entry in the heap that counts; 0 for none. Ranks are 1 at least."""
        self._heap: list[int] = []
        self._clock = 0
        self.num_members = 0

    def touch(self, nodes: Nodes, num_hits: NDArray[np.int32]) -> None:
        """They were used just now. `num_hits`: of each so far."""
        if self._kind == "lru":
            self._clock += 1
            self._rank[nodes] = self._clock
        else:
            self._rank[nodes] = self._clock + 1 + num_hits

    def add(self, node: int, parent: int, num_hits: int) -> None:
        """Into the tier. `parent` is -1 for none."""
        if self._kind == "lru":
            self._clock += 1
        self._rank[node] = self._clock if self._kind == "lru" else self._clock + 1 + num_hits
        self.is_member[node] = True
        self.num_members += 1
        if parent >= 0:
            self.num_children[parent] += 1
        self._offer(node)

    def remove(self, node: int, parent: int, *, for_room: bool) -> None:
        """Out of the tier; `for_room`: to make room for others."""
        if for_room and self._kind == "lfu":
            # What is new starts level with what went last, or else old favourites would stay for ever.
            self._clock = max(self._clock, int(self._rank[node]))
        self.is_member[node] = False
        self.num_members -= 1
        if parent >= 0:
            self.unlink(parent)

    def link(self, parent: int) -> None:
        """A member got this parent."""
        self.num_children[parent] += 1

    def unlink(self, parent: int) -> None:
        """A member of this parent went."""
        self.num_children[parent] -= 1
        self._offer(parent)

    def plan(
        self, num_wanted: int, may_go: Callable[[int], bool], parent_of: Callable[[int], int]
    ) -> list[int]:
        """Up to `num_wanted` members, each before its parent, that can be removed in this order."""
        victims: list[int] = []
        put_back: list[int] = []
        freed: dict[int, int] = {}
        num_spared = 0
        while self._heap and len(victims) < num_wanted and num_spared < MAX_SPARED:
            entry = heappop(self._heap)
            node = entry & _NODE_MASK
            if self._queued_at[node] != entry >> _NODE_BITS:
                continue  # a better one has taken its place
            if not self.is_member[node] or self.num_children[node] > freed.get(node, 0):
                self._queued_at[node] = 0
            elif self._rank[node] > entry >> _NODE_BITS:
                self._push(node)
            elif not may_go(node):
                num_spared += 1
                put_back.append(entry)
            else:
                victims.append(node)
                put_back.append(entry)
                if (parent := parent_of(node)) >= 0:
                    freed[parent] = freed.get(parent, 0) + 1
                    self._offer(parent, freed[parent])
        for entry in put_back:
            heappush(self._heap, entry)
        return victims

    def _offer(self, node: int, num_freed: int = 0) -> None:
        if self.is_member[node] and self.num_children[node] == num_freed:
            queued_at = self._queued_at[node]
            if not queued_at or queued_at > self._rank[node]:
                self._push(node)

    def _push(self, node: int) -> None:
        rank = int(self._rank[node])
        self._queued_at[node] = rank
        heappush(self._heap, rank << _NODE_BITS | node)
