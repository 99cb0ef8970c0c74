"""Live moves of this instance's modules, on the engine's thread: begin, copy in pieces, switch or cancel.

Pieces are copied between two steps, or between two layers of a long one; blocks that steps write meanwhile
are copied again. The switch copies the last of them between two steps, and the next step runs under the new
placement.
"""

import time
from collections.abc import Collection, Iterable, Mapping

from libs.engine.errors import MoveRefused, NoRoom, NotYet
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import Host, HostLost
from libs.engine.migration.home import Home
from libs.engine.migration.kv_copy import KvAway, KvCopy, KvHome
from libs.engine.migration.travelled_weights import restored
from libs.engine.outputs import CopyProgress, SequenceFailed, Switched
from libs.engine.scheduling.scheduler import blocks_for
from libs.engine.scheduling.sequence import Sequence, SequenceState
from libs.model.model import Layer, Model
from libs.placement.module import ModuleKind
from libs.placement.placement import Placed, Placement
from libs.request.outcome import FailureReason


def lose_host(home: Home, worker: str, why: str, cut: Collection[Sequence]) -> list[SequenceFailed]:
    """Begun sequences are preempted, and no block is found by name any more. Fails those that cannot be
    computed again: whose KV comes from outside, and `cut` ones, of which some layers have left in the step
    that broke. Nothing where the worker holds no module.

    Weights that had travelled are read again here, on the engine's thread: it runs no step for as long as
    that takes, 0.3 to 2 s. Raises WeightsLost, with nothing changed, where they cannot be.
    """
    before = home.arrangement.placement
    lost = [one for one in before.placed if one.worker == worker]
    if not lost:
        return []
    model = restored(home.runner.model, lost)
    detail = str(HostLost(worker, why))
    failing = [one for one in home.ledger.sequences.values() if one in cut or _awaits_kv(one)]
    failed = [home.ledger.fail(one, FailureReason.PEER_LOST, detail) for one in failing]
    home.ledger.preempt_all()
    home.ledger.allocator.forget_cached()
    home.loading.forget_ended()
    placement = before.without_worker(worker)
    dropped = sum(home.weights.num_bytes(one.move_id) for one in lost)
    if not home.arrangement.can_change(home.arrangement.num_blocks_of(placement, num_dropped_bytes=dropped)):
        reserved = [one for one in home.ledger.sequences.values() if not one.is_begun]
        failed += [home.ledger.fail(one, FailureReason.PEER_LOST, detail) for one in reserved]
    home.arrangement.change(placement, model, num_dropped_bytes=dropped)
    for one in lost:
        home.weights.came_back(one.move_id)
    home.on_placement(placement, f"{worker}: {why}")
    return failed


def _awaits_kv(sequence: Sequence) -> bool:
    """Whether KV is there, or on its way, that nobody here could compute."""
    if sequence.is_begun:
        return sequence.is_loading
    return sequence.state is SequenceState.LOADING or sequence.num_found_blocks > 0


class _Move:
    """The one that is under way."""

    def __init__(self, placed: Placed, copy: KvCopy, model_after: Model | None, *, is_return: bool) -> None:
        self.placed, self.copy, self.is_return = placed, copy, is_return
        self._layers: dict[int, Layer] = {}
        """That come home with it."""
        if is_return and model_after is not None:
            self._layers = {layer: model_after.layer(layer) for layer in placed.module.layers}

    def placement_after(self, now: Placement) -> Placement:
        return now.without(self.placed.move_id) if self.is_return else now.with_module(self.placed)

    def model_after(self, now: Model) -> Model:
        """Made of the model as it is by then: a lost host may have given other layers back meanwhile."""
        if self.placed.has_weights_at_home:
            return now
        return (
            now.with_layers(self._layers) if self.is_return else now.without_layers(self.placed.module.layers)
        )


class Moves:
    """At most one is under way; it goes by its move's id, a return by the id of the move that it undoes."""

    def __init__(self, home: Home, hosted: HostedModules) -> None:
        self._home, self._hosted = home, hosted
        self._arrangement, self._ledger, self._hosts = home.arrangement, home.ledger, home.hosts
        self._loading, self._weights = home.loading, home.weights
        self._move: _Move | None = None
        self._lost: HostLost | None = None
        """Found in the middle of a step."""
        self._went: tuple[frozenset[str], str] = frozenset(), ""
        """The moves that ended, or were undone, with the host that was lost last, and why it was."""
        self._has_limited = False
        home.arrangement.on_moved = self._rename

    def begin(self, placed: Placed, host: Host, model_after: Model | None) -> int:
        """See `Engine.begin_move`."""
        self._check_free()
        placement = self._arrangement.placement
        placement.with_module(placed)  # raises BadPlacement
        is_lent = placed.module.kind is ModuleKind.TOKENS
        least = 1 if is_lent else blocks_for(self._ledger.max_len, self._ledger.block_size)
        if placed.num_blocks < least:
            raise MoveRefused(f"{placed.worker} holds {placed.num_blocks} blocks; a sequence needs {least}")
        if placed.has_weights_at_home == (model_after is not None):
            raise MoveRefused("a model without the layers is needed exactly where their weights travel")
        self._check_weights_unused(placed)
        if not is_lent:
            self._limit_blocks(placed.num_blocks)
            self._arrangement.bound_cached()
        self._hosts.add(host)
        live = set[int]() if is_lent else self._ledger.allocator.live()
        copy = KvAway(self._home.pool, self._hosts, placed, live, placement.num_kv_heads)
        self._move = _Move(placed, copy, model_after, is_return=False)
        return copy.num_left(live)

    def begin_return(self, move_id: str, model_after: Model | None) -> int:
        """See `Engine.begin_return`."""
        self._check_free()
        placement = self._arrangement.placement
        placed = placement.get(move_id)
        if placed is None:
            raise MoveRefused(
                self._why_gone(move_id) or f"no module that move {move_id} brought away is away"
            )
        if placed.has_weights_at_home == (model_after is not None):
            raise MoveRefused("a model with the layers is needed exactly where their weights travelled")
        if placed.module.kind is not ModuleKind.TOKENS:
            self._arrangement.bound_cached()
        live = self._ledger.allocator.live()
        copy = KvHome(self._home.pool, self._hosts, placed, live, placement.num_kv_heads)
        self._move = _Move(placed, copy, model_after, is_return=True)
        return copy.num_left(live)

    def home_blocks_with(self, placed: Placed) -> int:
        """See `Engine.capacity_with`."""
        placement = self._arrangement.placement.with_module(placed)
        grown = self._weights.num_bytes_of(placed, self._home.runner.model)
        return self._arrangement.home_blocks(placement, grown)

    def copy_some(self, move_id: str, max_bytes: int) -> CopyProgress:
        """See `Engine.copy_some`. Raises NotYet while a piece is on its way home, and HostLost."""
        move, live = self._get(move_id), self._ledger.allocator.live()
        num_bytes = move.copy.copy_some(max_bytes, live)
        return CopyProgress(move.copy.num_left(live), num_bytes)

    def copy_in_step(self, move_id: str, max_bytes: int) -> CopyProgress:
        """`copy_some` between two layers of a step.

        Nothing is copied too early: what the step writes counts as written when it is over, so blocks of
        which some layers were not written yet are copied again, and no switch comes before that. The core
        deals with a lost host at the end of the step: until then blocks and sequences stay what they are.
        """
        try:
            return self.copy_some(move_id, max_bytes)
        except HostLost as lost:
            self._lost = lost
            raise

    def take_lost(self) -> HostLost | None:
        """The host that `copy_in_step` found lost; once."""
        lost, self._lost = self._lost, None
        return lost

    def switch(self, move_id: str) -> Switched:
        """See `Engine.switch`. Raises NotYet while loading steps are under way, and HostLost."""
        move, arrangement = self._get(move_id), self._arrangement
        after = move.placement_after(arrangement.placement)
        dropped = self._weights.num_bytes(move_id) if move.is_return else 0
        if not arrangement.can_change(arrangement.num_blocks_of(after, num_dropped_bytes=dropped)):
            raise NotYet
        if self._loading.are_under_way:
            self._loading.is_paused = True
            raise NotYet
        if not move.is_return:
            self._check_weights_unused(move.placed)  # guests may have come since it began
        began, num_before = time.perf_counter(), arrangement.num_blocks
        move.copy.catch_up(self._ledger.allocator.live())
        if not (move.is_return or move.placed.has_weights_at_home):
            self._weights.leave(move.placed, self._home.runner.model)
        model = move.model_after(self._home.runner.model)
        arrangement.max_blocks = None
        arrangement.change(after, model, num_dropped_bytes=dropped)
        if move.is_return:
            move.copy.fill(self._ledger.allocator.live())
            self._weights.came_back(move_id)
        self._hosted.model = model
        self._end()
        self._home.on_placement(after, "")
        pause = time.perf_counter() - began
        return Switched(after, pause, move.copy.num_bytes, num_before, arrangement.num_blocks)

    def cancel(self, move_id: str) -> None:
        """See `Engine.cancel_move`."""
        if self._move is not None and self._move.placed.move_id == move_id:
            self._end()

    def lose(self, worker: str, why: str, cut: Collection[Sequence]) -> list[SequenceFailed]:
        """See `Engine.lose_host`. A move to or from this worker is over; another one goes on."""
        gone = [one.move_id for one in self._arrangement.placement.placed if one.worker == worker]
        if self._move is not None and self._move.placed.worker == worker:
            gone.append(self._move.placed.move_id)
            self._end()
        if gone:
            self._went = frozenset(gone), why
        failed = lose_host(self._home, worker, why, cut)
        self._keep_hosts()
        self._hosted.model = self._home.runner.model
        return failed

    def settle(self) -> None:
        """Before a step: blocks that a move had to do without come back after it was cancelled."""
        if self._has_limited and self._move is None and not self._loading.are_under_way:
            self._has_limited = False
            self._arrangement.resize(None)

    def wrote(self, blocks: Iterable[int]) -> None:
        """KV of these blocks changed, in some layer, wherever it lies."""
        if self._move is not None:
            self._move.copy.wrote(blocks)

    @property
    def is_under_way(self) -> bool:
        """Whether writes have to be told."""
        return self._move is not None

    def _limit_blocks(self, num_blocks: int) -> None:
        """Ids that the new host does not have must not be used from now on."""
        if self._arrangement.num_blocks > num_blocks:
            if self._loading.are_under_way:
                self._loading.is_paused = True
                raise NotYet
            try:
                self._arrangement.resize(num_blocks)
            except NoRoom as refusal:
                hint = "wait until fewer run, or order it with more blocks"
                raise MoveRefused(f"{refusal}, as many as the host has for it; {hint}") from refusal
        self._arrangement.max_blocks = num_blocks
        self._has_limited = True

    def _rename(self, moved: Mapping[int, int]) -> None:
        if self._move is not None:
            self._move.copy.rename(moved)

    def _end(self) -> None:
        self._move = None
        self._arrangement.max_blocks = None
        self._loading.is_paused = False
        self._keep_hosts()

    def _keep_hosts(self) -> None:
        workers = {one.worker for one in self._arrangement.placement.placed}
        if self._move is not None:
            workers.add(self._move.placed.worker)
        self._hosts.keep(workers)

    def _check_weights_unused(self, placed: Placed) -> None:
        if placed.has_weights_at_home:
            return
        if self._hosted.own_layers_in_use.intersection(placed.module.layers):
            raise MoveRefused(
                "other instances' modules run with these weights here, so they cannot leave; order it as "
                "offload, or let those modules go home first"
            )

    def _get(self, move_id: str) -> _Move:
        if self._move is None or self._move.placed.move_id != move_id:
            raise MoveRefused(self._why_gone(move_id) or f"move {move_id} is not under way")
        return self._move

    def _why_gone(self, move_id: str) -> str:
        """For who asks for a move that ended before it was told so; empty where no lost host ended it."""
        moves, why = self._went
        return f"its host was lost: {why}" if move_id in moves else ""

    def _check_free(self) -> None:
        if self._move is not None:
            raise MoveRefused(f"move {self._move.placed.move_id} is under way; one at a time")
