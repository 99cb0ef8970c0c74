"""Where the KV of an instance lies: what a placement means for pool, block ids, sequences and hosts.

All changes happen between steps, with no step put aside: those know blocks by their ids.
"""

import numpy as np
import torch

from libs.engine.errors import NoRoom, NotYet
from libs.engine.forward.loading import LoadingSteps
from libs.engine.forward.remote_kv import WholeKv
from libs.engine.forward.runner import Runner
from libs.engine.hosting.calls import MoveBlocks
from libs.engine.memory.pool import BlockLayout, Pool
from libs.engine.migration.kv_copy import KvCopy
from libs.engine.scheduling.scheduler import blocks_for
from libs.engine.scheduling.sequence_table import SequenceTable
from libs.model.layer import layer_bytes
from libs.model.model import Model
from libs.placement.module import ModuleKind
from libs.placement.placement import PlacedModule, Placement

_CACHED_BYTES = 64 << 20
"""A change of layout rewrites every block; ones that nobody holds are kept up to so many bytes of them."""


class KvLayout:
    """Pool, sequences, runner and hosts agree about blocks before and after each of its operations."""

    def __init__(
        self, pool: Pool, sequences: SequenceTable, kv: WholeKv, runner: Runner, loading: LoadingSteps
    ) -> None:
        self.pool, self.sequences, self.kv = pool, sequences, kv
        self.runner, self.loading = runner, loading
        self.max_blocks: int | None = None
        """Blocks that the host of a module that is about to leave will hold: block ids stay below."""
        self.copy: KvCopy | None = None
        """The copy of the migration under way, which follows blocks to their new ids."""
        self._grown_bytes: dict[str, int] = {}
        """By migration: memory that weights which left with it freed, and that the pool uses now."""

    @property
    def placement(self) -> Placement:
        """The one in force."""
        return self.kv.placement

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences can have, remote ones among them."""
        return self.sequences.allocator.num_blocks

    def num_blocks_of(self, placement: Placement, *, num_dropped_bytes: int = 0) -> int:
        """Blocks under a placement: what this worker's memory, less the dropped bytes, and every host have,
        and remote blocks."""
        return self._num_own_blocks(placement, num_dropped_bytes) + _num_remote_blocks(placement)

    def capacity_with(self, placed: PlacedModule) -> int:
        """Blocks that this worker's memory would hold with one more module placed, whatever hosts have.

        Raises BadPlacement.
        """
        layout = self._layout(self.placement.with_module(placed))
        return self.pool.capacity(layout) + self._weight_bytes(placed) // layout.block_bytes

    def min_blocks(self) -> int:
        """Blocks of now that cannot be spared: those held, and enough for one whole sequence, also when
        every module is back at its owner."""
        longest = blocks_for(self.sequences.max_len, self.sequences.block_size)
        everything = longest * self._whole_block_bytes + sum(self._grown_bytes.values())
        return max(self._num_own_used, longest, -(-everything // self.pool.layout.block_bytes))

    def resize(self, num_blocks: int | None) -> None:
        """Makes the pool `num_blocks`, or as many as its memory and the hosts hold. Preempts nobody: blocks
        held by hash only go first.

        Raises:
            NoRoom: sequences hold more.
            NotYet: a step is put aside that knows blocks by their ids; nothing was changed.
        """
        self.wait_for_loading()
        own = self._num_own_blocks(self.placement, 0)
        own = own if num_blocks is None else min(num_blocks, own)
        if self._num_own_used > own:
            raise NoRoom(f"sequences hold {self._num_own_used} blocks; they do not fit into {own}")
        if own != self.pool.num_blocks:
            self.change(self.placement, self.runner.model, num_own_blocks=own)

    def wait_for_loading(self) -> None:
        """Raises NotYet while a step is put aside, and lets no other begin, so that there soon is none."""
        if self.loading.are_under_way:
            self.loading.is_paused = True
            raise NotYet

    def bound_cached(self) -> None:
        """Forgets blocks that are held by hash only, beyond what a change of layout keeps: they need not be
        copied."""
        self.sequences.allocator.forget_cached(keep=_CACHED_BYTES // self._whole_block_bytes)

    def can_change(self, num_blocks: int) -> bool:
        """Whether so many blocks are enough once sequences are preempted; those that await KV cannot be."""
        return self.sequences.num_reserved_blocks <= num_blocks

    def change(
        self,
        placement: Placement,
        model: Model,
        *,
        num_own_blocks: int | None = None,
        num_dropped_bytes: int = 0,
    ) -> None:
        """Brings everything under a placement.

        Into fewer blocks, what is held by hash only goes first, then the youngest sequences are preempted.
        Raises NoRoom, with nothing changed, where that is not enough.
        """
        own = self._num_own_blocks(placement, num_dropped_bytes) if num_own_blocks is None else num_own_blocks
        total, layout = own + _num_remote_blocks(placement), self._layout(placement)
        keep = total
        if layout.slots != self.pool.layout.slots:
            keep = _CACHED_BYTES // self._whole_block_bytes
        elif own < self.pool.num_blocks and placement.remote_blocks():
            keep = 0  # those of this worker must fit without the remote ones
        self._make_room(total, keep)
        with torch.inference_mode():
            moved = self._relayout(placement, layout, own)
        self.sequences.rename_blocks(total, moved)
        self.kv.placement = placement
        self.runner.refresh(model)
        if not moved:
            return
        if not placement.remote_blocks():  # remote blocks have ids of their own at their host
            self.kv.hosts.call_all(MoveBlocks(np.array([list(moved), list(moved.values())], dtype=np.int64)))
        if self.copy is not None:
            self.copy.rename(moved)

    def weights_left(self, placed: PlacedModule) -> None:
        """The module's weights go with it: the pool's memory grows by as much."""
        self._grown_bytes[placed.move_id] = self.pool.grow(self._weight_bytes(placed))

    def grown_bytes(self, move_id: str) -> int:
        """What the pool will have to give back when the weights of this migration return."""
        return self._grown_bytes.get(move_id, 0)

    def weights_returned(self, move_id: str) -> None:
        """The pool does not use their memory any more."""
        self.pool.shrink(self._grown_bytes.pop(move_id, 0))

    def _weight_bytes(self, placed: PlacedModule) -> int:
        """Memory that a module frees when it leaves; none where its weights stay, or memory cannot grow (on
        CUDA)."""
        model = self.runner.model
        if placed.has_weights_at_owner or model.device.type != "cpu":
            return 0
        return sum(layer_bytes(model.layer(layer)) for layer in placed.module.layers)

    def _relayout(self, placement: Placement, layout: BlockLayout, own: int) -> dict[int, int]:
        """Gives the pool `own` blocks of this layout; returns old and new ids of live blocks that got others,
        remote ones among them."""
        own_before, live = self.pool.num_blocks, self.sequences.allocator.live()
        live_here = {block for block in live if block < own_before}
        moved = self.pool.relayout(layout, live_here, num_blocks=own).moved
        remote = sorted(block for block in live if block >= own_before)
        if placement.remote_blocks():
            moved |= {block: block - own_before + own for block in remote if own != own_before}
        elif remote:
            taken = {moved.get(block, block) for block in live_here}
            free = (block for block in range(own) if block not in taken)
            moved |= {block: next(free) for block in remote}
        return moved

    def _make_room(self, num_blocks: int, num_kept: int) -> None:
        sequences = self.sequences
        if not self.can_change(num_blocks):
            raise NoRoom(
                f"{sequences.num_reserved_blocks} blocks await KV; they do not fit into {num_blocks}: "
                "wait until they run"
            )
        while sequences.allocator.num_used > num_blocks:
            sequences.preempt_youngest()
        sequences.allocator.forget_cached(keep=min(num_kept, num_blocks - sequences.allocator.num_used))

    def _num_own_blocks(self, placement: Placement, num_dropped_bytes: int) -> int:
        capacity = self.pool.capacity(self._layout(placement), num_given_up_bytes=num_dropped_bytes)
        granted = [one.num_blocks for one in placement.placed if one.module.kind is not ModuleKind.TOKENS]
        cap = [] if self.max_blocks is None else [self.max_blocks]
        return min([capacity, *granted, *cap])

    @property
    def _num_own_used(self) -> int:
        """Held blocks that lie here."""
        allocator = self.sequences.allocator
        if not self.placement.remote_blocks():
            return allocator.num_used
        return sum(1 for block in allocator.held() if block < self.pool.num_blocks)

    @property
    def _whole_block_bytes(self) -> int:
        layout = self.pool.layout
        num_slots = self.placement.num_layers * self.placement.num_kv_heads
        return num_slots * layout.slot_elements * layout.dtype.itemsize

    def _layout(self, placement: Placement) -> BlockLayout:
        layout = self.pool.layout
        return BlockLayout(placement.resident_slots(), layout.block_size, layout.head_dim, layout.dtype)


def _num_remote_blocks(placement: Placement) -> int:
    return sum(one.num_blocks for one in placement.remote_blocks())
