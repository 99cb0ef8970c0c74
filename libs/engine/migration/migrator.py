"""Live migration of this instance's modules, on the engine's thread: begin, copy in pieces, switch or cancel.

Pieces are copied between two steps, or between two layers of a long one; blocks that steps write meanwhile
are copied again. The switch copies the last of them between two steps, and the next step runs under the new
placement.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager

import torch

from libs.engine.errors import MoveRefused, NoRoom, NotYet, WeightsLost
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import Host, HostLost
from libs.engine.migration.kv_copy import InboundCopy, KvCopy, OutboundCopy
from libs.engine.migration.layout import KvLayout
from libs.engine.outputs import CopyProgress, SequenceFailed, Switched
from libs.engine.scheduling.scheduler import blocks_for
from libs.engine.scheduling.sequence import Sequence, SequenceState
from libs.model.errors import ModelError
from libs.model.model import Layer, Model
from libs.placement.module import ModuleKind
from libs.placement.placement import PlacedModule, Placement
from libs.request.outcome import FailureReason


class _Migration:
    """The one that is under way."""

    def __init__(
        self, placed: PlacedModule, copy: KvCopy, model_after: Model | None, *, is_return: bool
    ) -> None:
        self.placed, self.copy, self.is_return = placed, copy, is_return
        self._layers: dict[int, Layer] = {}
        """Weights that return with it."""
        if is_return and model_after is not None:
            self._layers = {layer: model_after.layer(layer) for layer in placed.module.layers}

    def placement_after(self, now: Placement) -> Placement:
        return now.without(self.placed.move_id) if self.is_return else now.with_module(self.placed)

    def model_after(self, now: Model) -> Model:
        """Made of the model as it is by then: a lost host may have given other layers back meanwhile."""
        if self.placed.has_weights_at_owner:
            return now
        return (
            now.with_layers(self._layers) if self.is_return else now.without_layers(self.placed.module.layers)
        )


class Migrator:
    """Carries out one migration at a time, named by its id; a return goes by the id of the one it undoes.

    `LiveMigration` states the contract of the operations that services call. Each of them, but for
    `copy_in_step`, deals with a lost host before it raises HostLost: see `lose_host`. `on_placement` hears
    each new placement, and the host that was lost and why, or an empty string.
    """

    def __init__(
        self, layout: KvLayout, hosted: HostedModules, on_placement: Callable[[Placement, str], None]
    ) -> None:
        self.layout, self._hosted, self._on_placement = layout, hosted, on_placement
        self._sequences, self._hosts, self._loading = layout.sequences, layout.kv.hosts, layout.loading
        self._under_way: _Migration | None = None
        self._failed: list[SequenceFailed] = []
        self._lost: HostLost | None = None
        """Found in the middle of a step."""
        self._ended_by_loss: tuple[frozenset[str], str] = frozenset(), ""
        """The migrations that ended, or were undone, with the host that was lost last, and why it was."""
        self._has_limited = False

    @property
    def model(self) -> Model:
        """The model, less the layers whose weights are elsewhere."""
        return self.layout.runner.model

    def begin(self, placed: PlacedModule, host: Host, model_after: Model | None) -> int:
        """Begins to copy a module to its host; returns the blocks to copy."""
        with self.losing_hosts():
            self._check_free()
            placement = self.layout.placement
            placement.with_module(placed)  # raises BadPlacement
            is_remote = placed.module.kind is ModuleKind.TOKENS
            longest = 1 if is_remote else blocks_for(self._sequences.max_len, self._sequences.block_size)
            if placed.num_blocks < longest:
                raise MoveRefused(
                    f"{placed.worker} holds {placed.num_blocks} blocks; a sequence needs {longest}"
                )
            if placed.has_weights_at_owner == (model_after is not None):
                raise MoveRefused("a model without the layers is needed exactly where their weights travel")
            self._check_weights_unused(placed)
            if not is_remote:
                self._limit_blocks(placed.num_blocks)
                self.layout.bound_cached()
            self._hosts.add(host)
            live = set[int]() if is_remote else self._sequences.allocator.live()
            copy = OutboundCopy(self.layout.pool, self._hosts, placed, live, placement.num_kv_heads)
            self._start(_Migration(placed, copy, model_after, is_return=False))
            return copy.num_left(live)

    def begin_return(self, move_id: str, model_after: Model | None) -> int:
        """Begins to copy a module back from its host; returns the blocks to copy."""
        with self.losing_hosts():
            self._check_free()
            placement = self.layout.placement
            placed = placement.get(move_id)
            if placed is None:
                raise MoveRefused(
                    self._why_ended(move_id) or f"no module that move {move_id} brought away is away"
                )
            if placed.has_weights_at_owner == (model_after is not None):
                raise MoveRefused("a model with the layers is needed exactly where their weights travelled")
            if placed.module.kind is not ModuleKind.TOKENS:
                self.layout.bound_cached()
            live = self._sequences.allocator.live()
            copy = InboundCopy(self.layout.pool, self._hosts, placed, live, placement.num_kv_heads)
            self._start(_Migration(placed, copy, model_after, is_return=True))
            return copy.num_left(live)

    def copy_some(self, move_id: str, max_bytes: int) -> CopyProgress:
        """Copies a piece between two steps. Raises NotYet while an inbound piece is on its way."""
        with self.losing_hosts():
            return self._copy_some(move_id, max_bytes)

    def copy_in_step(self, move_id: str, max_bytes: int) -> CopyProgress:
        """`copy_some` between two layers of a step.

        Nothing is copied too early: what the step writes counts as written when it is over, so blocks of
        which some layers were not written yet are copied again, and no switch comes before that. A lost host
        is dealt with at the end of the step, by `settle_lost`: until then blocks and sequences stay what they
        are.
        """
        try:
            return self._copy_some(move_id, max_bytes)
        except HostLost as lost:
            self._lost = lost
            raise

    def switch(self, move_id: str) -> Switched:
        """Copies what is left and brings the new placement into force.

        Raises NotYet while steps are put aside, or sequences that await KV need more blocks than there would
        be.
        """
        with self.losing_hosts():
            migration, layout = self._get(move_id), self.layout
            after = migration.placement_after(layout.placement)
            dropped = layout.grown_bytes(move_id) if migration.is_return else 0
            if not layout.can_change(layout.num_blocks_of(after, num_dropped_bytes=dropped)):
                raise NotYet
            layout.wait_for_loading()
            if not migration.is_return:
                self._check_weights_unused(migration.placed)  # hosted modules may have come since it began
            began, num_before = time.perf_counter(), layout.num_blocks
            self._change(migration, after, dropped)
            pause = time.perf_counter() - began
            return Switched(after, pause, migration.copy.num_bytes, num_before, layout.num_blocks)

    def cancel(self, move_id: str) -> None:
        """Ends the migration before its switch; ignored where it is not under way."""
        if self._under_way is not None and self._under_way.placed.move_id == move_id:
            self._end()

    def lose_host(self, worker: str, why: str, cut: Collection[Sequence] = ()) -> None:
        """Brings every module of a lost host back, without its KV; another host's migration goes on.

        Begun sequences are preempted, and no block is found by hash any more. Those that cannot be computed
        again fail: whose KV comes from outside, and `cut` ones, of which some layers have left in the step
        that broke. No effect where the worker holds no module. Weights that had travelled are read again here
        and now, which takes 0.3 to 2 s. Raises WeightsLost, with nothing changed, where they cannot be.
        """
        ended = [one.move_id for one in self.layout.placement.placed if one.worker == worker]
        if self._under_way is not None and self._under_way.placed.worker == worker:
            ended.append(self._under_way.placed.move_id)
            self._end()
        if ended:
            self._ended_by_loss = frozenset(ended), why
        lost = [one for one in self.layout.placement.placed if one.worker == worker]
        if lost:
            with torch.inference_mode():
                self._bring_back(worker, why, lost, cut)
        self._keep_hosts()
        self._hosted.model = self.model

    @contextmanager
    def losing_hosts(self) -> Generator[None]:
        """For what waits for hosts between two steps: deals with a lost one, and raises HostLost."""
        try:
            with torch.inference_mode():
                yield
        except HostLost as lost:
            self.lose_host(lost.worker, lost.why)
            raise

    def settle_lost(self) -> None:
        """After a step: deals with the host that `copy_in_step` found lost."""
        lost, self._lost = self._lost, None
        if lost is not None:
            self.lose_host(lost.worker, lost.why)

    def take_failed(self) -> list[SequenceFailed]:
        """Sequences that failed with a lost host since this was last asked."""
        failed, self._failed = self._failed, []
        return failed

    def give_back_blocks(self) -> None:
        """Before a step: blocks that a migration had to do without come back after it was cancelled."""
        if self._has_limited and self._under_way is None and not self._loading.are_under_way:
            self._has_limited = False
            self.layout.resize(None)

    def wrote(self, blocks: Iterable[int]) -> None:
        """KV of these blocks changed, in some layer, wherever it lies."""
        if self._under_way is not None:
            self._under_way.copy.wrote(blocks)

    @property
    def is_under_way(self) -> bool:
        """Whether `wrote` has to be called."""
        return self._under_way is not None

    def _copy_some(self, move_id: str, max_bytes: int) -> CopyProgress:
        migration, live = self._get(move_id), self._sequences.allocator.live()
        num_bytes = migration.copy.copy_some(max_bytes, live)
        return CopyProgress(migration.copy.num_left(live), num_bytes)

    def _change(self, migration: _Migration, after: Placement, num_dropped_bytes: int) -> None:
        layout, placed = self.layout, migration.placed
        migration.copy.catch_up(self._sequences.allocator.live())
        if not (migration.is_return or placed.has_weights_at_owner):
            layout.weights_left(placed)
        model = migration.model_after(self.model)
        layout.max_blocks = None
        layout.change(after, model, num_dropped_bytes=num_dropped_bytes)
        if migration.is_return:
            migration.copy.fill(self._sequences.allocator.live())
            layout.weights_returned(placed.move_id)
        self._hosted.model = model
        self._end()
        self._on_placement(after, "")

    def _bring_back(self, worker: str, why: str, lost: list[PlacedModule], cut: Collection[Sequence]) -> None:
        layout, sequences = self.layout, self._sequences
        model = _restored(self.model, lost)
        detail = str(HostLost(worker, why))
        failing = [one for one in sequences.by_id.values() if one in cut or _awaits_kv(one)]
        self._failed += [sequences.fail(one, FailureReason.PEER_LOST, detail) for one in failing]
        sequences.preempt_all()
        sequences.allocator.forget_cached()
        self._loading.forget_ended()
        placement = layout.placement.without_worker(worker)
        dropped = sum(layout.grown_bytes(one.move_id) for one in lost)
        if not layout.can_change(layout.num_blocks_of(placement, num_dropped_bytes=dropped)):
            reserved = [one for one in sequences.by_id.values() if not one.is_begun]
            self._failed += [sequences.fail(one, FailureReason.PEER_LOST, detail) for one in reserved]
        layout.change(placement, model, num_dropped_bytes=dropped)
        for one in lost:
            layout.weights_returned(one.move_id)
        self._on_placement(placement, f"{worker}: {why}")

    def _limit_blocks(self, num_blocks: int) -> None:
        """Ids that the new host does not have must not be used from now on."""
        if self.layout.num_blocks > num_blocks:
            try:
                self.layout.resize(num_blocks)
            except NoRoom as refusal:
                hint = "wait until fewer run, or order it with more blocks"
                raise MoveRefused(f"{refusal}, as many as the host has for it; {hint}") from refusal
        self.layout.max_blocks = num_blocks
        self._has_limited = True

    def _start(self, migration: _Migration) -> None:
        self._under_way = migration
        self.layout.copy = migration.copy

    def _end(self) -> None:
        self._under_way = self.layout.copy = None
        self.layout.max_blocks = None
        self._loading.is_paused = False
        self._keep_hosts()

    def _keep_hosts(self) -> None:
        workers = {one.worker for one in self.layout.placement.placed}
        if self._under_way is not None:
            workers.add(self._under_way.placed.worker)
        self._hosts.keep(workers)

    def _check_weights_unused(self, placed: PlacedModule) -> None:
        if placed.has_weights_at_owner:
            return
        if self._hosted.own_layers_in_use.intersection(placed.module.layers):
            raise MoveRefused(
                "other instances' modules run with these weights here, so they cannot leave; order it as "
                "offload, or let those modules go home first"
            )

    def _get(self, move_id: str) -> _Migration:
        if self._under_way is None or self._under_way.placed.move_id != move_id:
            raise MoveRefused(self._why_ended(move_id) or f"move {move_id} is not under way")
        return self._under_way

    def _why_ended(self, move_id: str) -> str:
        """Why a migration ended that its caller does not know of yet; empty where no lost host ended it."""
        ended, why = self._ended_by_loss
        return f"its host was lost: {why}" if move_id in ended else ""

    def _check_free(self) -> None:
        if self._under_way is not None:
            raise MoveRefused(f"move {self._under_way.placed.move_id} is under way; one at a time")


def _restored(model: Model, lost: Iterable[PlacedModule]) -> Model:
    """The model with the weights that travelled read again. Raises WeightsLost."""
    for placed in lost:
        if placed.has_weights_at_owner:
            continue
        layers = placed.module.layers
        try:
            model = model.with_layers(model.reload_layers(layers))
        except (ModelError, OSError) as error:
            raise WeightsLost(placed.worker, layers, error) from error
    return model


def _awaits_kv(sequence: Sequence) -> bool:
    """Whether KV is there, or on its way, that nobody here could compute."""
    if sequence.is_begun:
        return sequence.is_loading
    return sequence.state is SequenceState.LOADING or sequence.num_found_blocks > 0
