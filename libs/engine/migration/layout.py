"""Where the KV of an instance lies: what a placement means for pool, block ids, sequences and hosts.

All changes happen between steps, with no step put aside: those know blocks by their ids.
"""

from collections.abc import Callable, Mapping

import numpy as np

from libs.engine.errors import NoRoom
from libs.engine.forward.remote_kv import WholeKv
from libs.engine.forward.runner import Runner
from libs.engine.hosting.calls import MoveBlocks
from libs.engine.memory.pool import BlockLayout, Pool
from libs.engine.scheduling.scheduler import blocks_for
from libs.engine.scheduling.sequence_table import Ledger
from libs.model.model import Model
from libs.placement.module import ModuleKind
from libs.placement.placement import Placement

_CACHED_BYTES = 64 << 20
"""A change of layout rewrites every block; ones that nobody holds are kept up to so many bytes of them."""


class Arrangement:
    """Pool, ledger, runner and hosts agree about blocks before and after each of its operations."""

    def __init__(self, pool: Pool, ledger: Ledger, kv: WholeKv, runner: Runner) -> None:
        self._pool, self._ledger, self._kv, self._runner = pool, ledger, kv, runner
        self.max_blocks: int | None = None
        """What a host of a module that is about to leave will hold: block ids stay below."""
        self.on_moved: Callable[[Mapping[int, int]], None] | None = None
        """Hears which live blocks got other ids."""

    @property
    def placement(self) -> Placement:
        """The one in force."""
        return self._kv.placement

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can have, lent ones among them."""
        return self._ledger.allocator.num_blocks

    def num_blocks_of(self, placement: Placement, *, num_dropped_bytes: int = 0) -> int:
        """Blocks under a placement: what this worker's memory, less the dropped bytes, and every host have,
        and what is lent."""
        return self._num_own_blocks(placement, num_dropped_bytes) + _num_lent_blocks(placement)

    def home_blocks(self, placement: Placement, num_grown_bytes: int = 0) -> int:
        """Blocks that this worker's memory alone, and so many bytes more, hold under a placement, whatever
        hosts have."""
        layout = self._layout(placement)
        return self._pool.capacity(layout) + num_grown_bytes // layout.block_bytes

    def least_blocks(self, num_grown_bytes: int) -> int:
        """Blocks of now that cannot be spared: those held, and enough for one whole sequence, also when
        everything is home again."""
        everything = blocks_for(self._ledger.max_len, self._ledger.block_size) * self._whole_block_bytes
        home = -(-(everything + num_grown_bytes) // self._pool.layout.block_bytes)
        longest = blocks_for(self._ledger.max_len, self._ledger.block_size)
        return max(self._num_own_used, longest, home)

    def resize(self, num_blocks: int | None) -> None:
        """Makes the pool `num_blocks`, or as many as its memory and the hosts hold. Raises NoRoom where
        sequences hold more."""
        own = self._num_own_blocks(self.placement, 0)
        own = own if num_blocks is None else min(num_blocks, own)
        if self._num_own_used > own:
            raise NoRoom(f"sequences hold {self._num_own_used} blocks; they do not fit into {own}")
        if own != self._pool.num_blocks:
            self.change(self.placement, self._runner.model, num_own_blocks=own)

    def bound_cached(self) -> None:
        """Forgets blocks that are held by name only, beyond what a change of layout keeps: they need not be
        copied."""
        self._ledger.allocator.forget_cached(keep=_CACHED_BYTES // self._whole_block_bytes)

    def can_change(self, num_blocks: int) -> bool:
        """Whether so many blocks are enough once sequences are preempted; those that await KV cannot be."""
        return self._ledger.num_reserved_blocks <= num_blocks

    def change(
        self,
        placement: Placement,
        model: Model,
        *,
        num_own_blocks: int | None = None,
        num_dropped_bytes: int = 0,
    ) -> None:
        """Brings everything under a placement.

        Into fewer blocks, what is held by name only goes first, then the youngest sequences are preempted.
        Raises NoRoom, with nothing changed, where that is not enough.
        """
        own_before = self._pool.num_blocks
        own = self._num_own_blocks(placement, num_dropped_bytes) if num_own_blocks is None else num_own_blocks
        total, layout = own + _num_lent_blocks(placement), self._layout(placement)
        keep = total
        if layout.slots != self._pool.layout.slots:
            keep = _CACHED_BYTES // self._whole_block_bytes
        elif own < own_before and placement.lent():
            keep = 0  # those at home must fit without the lent ones
        self._make_room(total, keep)
        live = self._ledger.allocator.live()
        moved = self._pool.relayout(
            layout, {block for block in live if block < own_before}, num_blocks=own
        ).moved
        lent = sorted(block for block in live if block >= own_before)
        if placement.lent():
            moved |= {block: block - own_before + own for block in lent if own != own_before}
        elif lent:
            taken = {moved.get(block, block) for block in live if block < own_before}
            free = (block for block in range(own) if block not in taken)
            moved |= {block: next(free) for block in lent}
        self._ledger.rename_blocks(total, moved)
        self._kv.placement = placement
        self._runner.refresh(model)
        self._tell(placement, moved)

    def _tell(self, placement: Placement, moved: dict[int, int]) -> None:
        if not moved:
            return
        if not placement.lent():  # lent blocks are named by their host
            self._kv.hosts.tell_all(MoveBlocks(np.array([list(moved), list(moved.values())], dtype=np.int64)))
        if self.on_moved is not None:
            self.on_moved(moved)

    def _make_room(self, num_blocks: int, num_kept: int) -> None:
        ledger = self._ledger
        if not self.can_change(num_blocks):
            raise NoRoom(
                f"{ledger.num_reserved_blocks} blocks await KV; they do not fit into {num_blocks}: "
                "wait until they run"
            )
        while ledger.allocator.num_used > num_blocks:
            ledger.preempt_youngest()
        ledger.allocator.forget_cached(keep=min(num_kept, num_blocks - ledger.allocator.num_used))

    def _num_own_blocks(self, placement: Placement, num_dropped_bytes: int) -> int:
        capacity = self._pool.capacity(self._layout(placement), num_given_up_bytes=num_dropped_bytes)
        granted = [one.num_blocks for one in placement.placed if one.module.kind is not ModuleKind.TOKENS]
        cap = [] if self.max_blocks is None else [self.max_blocks]
        return min([capacity, *granted, *cap])

    @property
    def _num_own_used(self) -> int:
        """Held blocks that lie here."""
        allocator = self._ledger.allocator
        if not self.placement.lent():
            return allocator.num_used
        return sum(1 for block in allocator.held() if block < self._pool.num_blocks)

    @property
    def _whole_block_bytes(self) -> int:
        return self._layout_bytes(self.placement.num_layers * self.placement.num_kv_heads)

    def _layout_bytes(self, num_slots: int) -> int:
        layout = self._pool.layout
        return num_slots * layout.slot_elements * layout.dtype.itemsize

    def _layout(self, placement: Placement) -> BlockLayout:
        layout = self._pool.layout
        return BlockLayout(placement.resident_slots(), layout.block_size, layout.head_dim, layout.dtype)


def _num_lent_blocks(placement: Placement) -> int:
    return sum(one.num_blocks for one in placement.lent())
