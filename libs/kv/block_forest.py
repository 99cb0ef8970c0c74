"""Which of a store's blocks follows which: chains of numbers, also where a part is missing. Pure.

A block whose parent is not here is a root. It waits for that one by its name, and is joined to it when it
comes.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

NO_NODE: Final = -1


class BlockForest:
    """Parents and children among `capacity` numbers; memory is taken only where they are used."""

    def __init__(self, capacity: int) -> None:
        # Links are node + 1, so that untouched memory means none.
        self._parent, self._first_child, self._next, self._previous = (
            np.zeros(capacity, dtype=np.int32) for _ in range(4)
        )
        self._orphans: dict[bytes, int] = {}
        """By the name of a parent that is not here: the first of its children."""
        self._awaits: dict[int, bytes] = {}
        self.num_children = np.zeros(capacity, dtype=np.int32)

    def parent_of(self, node: int) -> int:
        """NO_NODE for a root."""
        return int(self._parent[node]) - 1

    def awaited_by(self, root: int) -> bytes:
        """The name of the parent that it waits for; b"" at the start of a chain."""
        return self._awaits.get(root, b"")

    def subtree(self, top: int) -> Iterator[int]:
        """Parents before children."""
        waiting = [top]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(self._children(node))

    def join(self, node: int, name: bytes, parent: int, parent_name: bytes) -> list[int]:
        """A new node under its parent; where that is not here (NO_NODE) it waits for `parent_name`, unless it
        starts a chain. Returns the children that waited for it, and hang from it now."""
        if parent not in (NO_NODE, node):
            self._link(node, parent)
        elif parent == NO_NODE and parent_name:
            self._awaits[node] = parent_name
            self._push(node, self._orphans.get(parent_name, 0))
            self._orphans[parent_name] = node + 1
        waiting = self._orphans.pop(name, 0)
        root = self._root_of(node) if waiting else node
        joined: list[int] = []
        while waiting:
            child, waiting = waiting - 1, int(self._next[waiting - 1])
            self._next[child] = self._previous[child] = 0
            del self._awaits[child]
            if child != root:  # or else somebody named its own descendant as its parent
                self._link(child, node)
                joined.append(child)
        return joined

    def leave(self, node: int) -> None:
        """It is here no more. Children that it still has are roots now, and wait for nobody."""
        for child in list(self._children(node)):
            self._parent[child] = self._next[child] = self._previous[child] = 0
        self._unlink(node)
        self._first_child[node] = self.num_children[node] = 0

    def _link(self, child: int, parent: int) -> None:
        self._parent[child] = parent + 1
        self._push(child, int(self._first_child[parent]))
        self._first_child[parent] = child + 1
        self.num_children[parent] += 1

    def _push(self, node: int, head: int) -> None:
        self._next[node], self._previous[node] = head, 0
        if head:
            self._previous[head - 1] = node + 1

    def _root_of(self, node: int) -> int:
        while (parent := self.parent_of(node)) != NO_NODE:
            node = parent
        return node

    def _children(self, node: int) -> Iterator[int]:
        child = int(self._first_child[node])
        while child:
            following = int(self._next[child - 1])
            yield child - 1
            child = following

    def _unlink(self, node: int) -> None:
        following, previous = int(self._next[node]), int(self._previous[node])
        parent, awaited = self.parent_of(node), self._awaits.pop(node, None)
        if following:
            self._previous[following - 1] = previous
        if previous:
            self._next[previous - 1] = following
        elif parent != NO_NODE:
            self._first_child[parent] = following
        elif awaited is not None and following:
            self._orphans[awaited] = following
        elif awaited is not None:
            del self._orphans[awaited]
        if parent != NO_NODE:
            self.num_children[parent] -= 1
        self._parent[node] = self._next[node] = self._previous[node] = 0
