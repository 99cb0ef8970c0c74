"""The KV of one module on its way, piece by piece."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from libs.engine.errors import NotYet
from libs.engine.forward.remote_kv import Hosts
from libs.engine.hosting.calls import ReadBlocks, WriteBlocks
from libs.engine.hosting.port import Answer
from libs.engine.memory.pool import Pool, SlotRows
from libs.placement.module import ModuleKind
from libs.placement.placement import PlacedModule

_PIECE_BYTES = 8 << 20
"""Read or written at once where no one sets a limit."""
_MAX_ASKED = 2
"""Inbound pieces: one is read at the host while another one travels."""
_GONE = -1
"""In place of a block that is over; no block has this id."""


class DirtyBlocks:
    """Block ids in the order in which they were written last: those at the front rest longest."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._blocks: dict[int, None] = dict.fromkeys(blocks)

    def add(self, blocks: Iterable[int]) -> None:
        """They were written (again)."""
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None

    def num_left(self, live: Collection[int]) -> int:
        """How many still have to be copied: what nobody holds any more need not be."""
        return sum(1 for block in self._blocks if block in live)

    def take(self, num_blocks: int, live: Collection[int]) -> list[int]:
        """The next blocks to copy, at most so many, which count as copied from now on."""
        taken: list[int] = []
        for block in list(self._blocks):
            if len(taken) == num_blocks:
                break
            del self._blocks[block]
            if block in live:
                taken.append(block)
        return taken

    def rename(self, moved: Mapping[int, int]) -> None:
        """Blocks got other ids."""
        self._blocks = {moved.get(block, block): None for block in self._blocks}


class Staging:
    """Pieces of blocks as they came, and where in them each block is by its id."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[SlotRows, int]] = {}

    def put(self, blocks: Sequence[int], kv: torch.Tensor) -> None:
        """Keeps `kv`, `[n, slots, 2, block_size, head_dim]`, in place of what was there of these blocks."""
        piece = SlotRows(kv.contiguous())
        for index, block in enumerate(blocks):
            self._places[block] = piece, index

    def rename(self, moved: Mapping[int, int]) -> None:
        """Blocks got other ids. Where one takes the id of another, that one is not live any more."""
        kept = {block: place for block, place in self._places.items() if block not in moved}
        there = {moved[block]: place for block, place in self._places.items() if block in moved}
        self._places = kept | there

    def fill(self, pool: torch.Tensor, slots: Sequence[int], live: set[int]) -> None:
        """Copies live blocks into the `slots` of the same blocks of `pool`."""
        targets, rows = np.array(slots, dtype=np.int64), SlotRows(pool)
        everything = np.arange(len(slots))
        for block, (piece, index) in self._places.items():
            if block in live:
                rows.copy(block, targets, piece, index, everything)


class KvCopy(Protocol):
    """One direction of a migration. `live` are the blocks that somebody holds or can find, each time."""

    num_bytes: int
    """Copied so far."""

    def num_left(self, live: set[int]) -> int:
        """Blocks that still have to be copied."""
        ...

    def wrote(self, blocks: Iterable[int]) -> None:
        """They have to be copied (again)."""
        ...

    def rename(self, moved: Mapping[int, int]) -> None:
        """Live blocks got other ids, here and at the host."""
        ...

    def copy_some(self, max_bytes: int, live: set[int]) -> int:
        """Copies at least a block, where one is left; returns the bytes. Raises NotYet, HostLost."""
        ...

    def catch_up(self, live: set[int]) -> None:
        """Copies all that is left: whatever is asked of the host from now on finds it there. Raises
        HostLost."""
        ...

    def fill(self, live: set[int]) -> None:
        """Puts what was copied into its place in the pool, under the new layout."""
        ...


class OutboundCopy:
    """From the pool to the host. Remote blocks take nothing with them."""

    def __init__(
        self, pool: Pool, hosts: Hosts, placed: PlacedModule, live: Iterable[int], num_kv_heads: int
    ) -> None:
        self.num_bytes = 0
        self._pool, self._hosts, self._placed = pool, hosts, placed
        self._is_remote = placed.module.kind is ModuleKind.TOKENS
        self._slots = placed.module.slots(num_kv_heads)
        self._dirty = DirtyBlocks(() if self._is_remote else live)

    def num_left(self, live: set[int]) -> int:
        """See KvCopy."""
        return self._dirty.num_left(live)

    def wrote(self, blocks: Iterable[int]) -> None:
        """See KvCopy."""
        if not self._is_remote:
            self._dirty.add(blocks)

    def rename(self, moved: Mapping[int, int]) -> None:
        """See KvCopy."""
        self._dirty.rename(moved)

    def copy_some(self, max_bytes: int, live: set[int]) -> int:
        """See KvCopy."""
        num_blocks = max(1, max_bytes // _bytes_of(self._pool, self._slots))
        blocks = np.array(self._dirty.take(num_blocks, live), dtype=np.int64)
        if not len(blocks):
            return 0
        kv = _slots_of(self._pool, blocks, self._slots)
        answer = self._hosts.call(self._placed.worker, WriteBlocks(self._placed.move_id, None, blocks, kv))
        if answer.is_done:
            answer.result()  # of a host that is known to be lost: nothing is to be switched to it
        self.num_bytes += kv.nbytes
        return kv.nbytes

    def catch_up(self, live: set[int]) -> None:
        """See KvCopy. Nobody waits for it: a host does what it is asked in order."""
        while self.copy_some(_PIECE_BYTES, live):
            pass

    def fill(self, live: set[int]) -> None:
        """See KvCopy. Nothing came."""


class InboundCopy:
    """From the host to memory beside the pool; into the pool once its blocks have room for it."""

    def __init__(
        self, pool: Pool, hosts: Hosts, placed: PlacedModule, live: Iterable[int], num_kv_heads: int
    ) -> None:
        self.num_bytes = 0
        self._pool, self._hosts, self._placed = pool, hosts, placed
        self._slots = placed.module.slots(num_kv_heads)
        self._is_remote = placed.module.kind is ModuleKind.TOKENS
        blocks = [block for block in live if block >= self._first_remote]
        self._dirty = DirtyBlocks(blocks)
        self._staging = Staging()
        self._asked = deque[tuple[list[int], Answer]]()

    def num_left(self, live: set[int]) -> int:
        """See KvCopy."""
        return self._dirty.num_left(live) + sum(len(blocks) for blocks, _ in self._asked)

    def wrote(self, blocks: Iterable[int]) -> None:
        """See KvCopy."""
        self._dirty.add(block for block in blocks if block >= self._first_remote)

    def rename(self, moved: Mapping[int, int]) -> None:
        """See KvCopy. What is on its way was asked for before the host heard of it."""
        self._dirty.rename(moved)
        self._staging.rename(moved)
        names = {**dict.fromkeys(moved.values(), _GONE), **moved}
        for blocks, _ in self._asked:
            blocks[:] = [names.get(block, block) for block in blocks]

    def copy_some(self, max_bytes: int, live: set[int]) -> int:
        """See KvCopy. NotYet while what was asked for has not come."""
        self._ask_ahead(max_bytes, live)
        if not self._asked:
            return 0
        if not self._asked[0][1].is_done:
            raise NotYet
        num_bytes = self._take()
        self._ask_ahead(max_bytes, live)
        return num_bytes

    def catch_up(self, live: set[int]) -> None:
        """See KvCopy."""
        self._ask_ahead(_PIECE_BYTES, live)
        while self._asked:
            self._take()
            self._ask_ahead(_PIECE_BYTES, live)  # while it waits KV from outside is written

    def fill(self, live: set[int]) -> None:
        """See KvCopy."""
        place = {slot: index for index, slot in enumerate(self._pool.layout.slots)}
        self._staging.fill(self._pool.blocks, [place[slot] for slot in self._slots], live)

    @property
    def _first_remote(self) -> int:
        """Of a module of remote blocks, its owner's id of the first one; others have all ids."""
        return self._pool.num_blocks if self._is_remote else 0

    def _ask_ahead(self, max_bytes: int, live: set[int]) -> None:
        num_blocks = max(1, max_bytes // _bytes_of(self._pool, self._slots))
        while len(self._asked) < _MAX_ASKED and (blocks := self._dirty.take(num_blocks, live)):
            ids = np.array(blocks, dtype=np.int64) - self._first_remote
            call = ReadBlocks(self._placed.move_id, None, ids)
            self._asked.append((blocks, self._hosts.call(self._placed.worker, call)))

    def _take(self) -> int:
        """The piece that was asked for first: a later one has what was written meanwhile."""
        blocks, answer = self._asked[0]
        kv = self._hosts.wait(self._placed.worker, answer)
        self._asked.popleft()
        self._staging.put(blocks, kv)
        self.num_bytes += kv.nbytes
        return kv.nbytes


def _bytes_of(pool: Pool, slots: Sized) -> int:
    """Of one block."""
    return len(slots) * pool.layout.slot_elements * pool.layout.dtype.itemsize


def _slots_of(pool: Pool, blocks: NDArray[np.int64], slots: Iterable[tuple[int, int]]) -> torch.Tensor:
    """A copy of some slots of some blocks."""
    place = {slot: index for index, slot in enumerate(pool.layout.slots)}
    columns = np.array([place[slot] for slot in slots], dtype=np.int64)
    flat = (blocks[:, None] * len(pool.layout.slots) + columns).reshape(-1)
    kv, everything = pool.blocks, pool.blocks.flatten(0, 1)
    picked = everything.index_select(0, torch.from_numpy(flat).to(kv.device))
    return picked.view(len(blocks), len(columns), *kv.shape[2:])
