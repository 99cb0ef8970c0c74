"""Moves of the own instance's modules, as services see them; `libs.engine.migration.migrations` does them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from libs.engine.hosting.port import Host
from libs.engine.migration.migrations import Moves
from libs.engine.outputs import CopyProgress, Switched
from libs.engine.thread import EngineThread
from libs.model.model import Model
from libs.placement.placement import Placed, Placement

Ask = Callable[..., Awaitable[Any]]
"""Does something on the engine's thread; see `Command`."""


class Moving:
    """Methods are called on the event loop of the engine. All raise EngineClosed, EngineDied."""

    def __init__(self, thread: EngineThread, ask: Ask, placement: Placement) -> None:
        self._thread, self._ask = thread, ask
        self.placement = placement
        """Where the instance's modules are, as of the last change that listeners heard."""
        self._listeners: list[Callable[[Placement, str], None]] = []

    def listen(self, hear: Callable[[Placement, str], None]) -> None:
        """Calls `hear` on the event loop after each change of placement: with the new one, and with the name
        of a host that was lost and why, else an empty string."""
        self._listeners.append(hear)

    def placement_changed(self, placement: Placement, lost: str) -> None:
        """For the engine: the placement that its thread uses from now on."""
        self.placement = placement
        for hear in self._listeners:
            hear(placement, lost)

    @property
    def num_total_blocks(self) -> int:
        """Blocks of the pool, as of the last step."""
        return self._thread.load.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, as of the last step; blocks only kept by name are free."""
        return self._thread.load.num_blocks - self._thread.load.num_used_blocks

    async def model_here(self) -> Model:
        """The model, less the layers whose weights are away."""
        model: Model = await self._ask(lambda core: core.model)
        return model

    async def capacity_with(self, placed: Placed) -> int:
        """Blocks that this worker's own memory would hold after that move: what to ask the host for.

        Of lent blocks: those here, without any lent. Raises BadPlacement.
        """
        num_blocks: int = await self._ask(lambda core: core.moves.home_blocks_with(placed))
        return num_blocks

    async def begin_move(self, placed: Placed, host: Host, *, model_after: Model | None = None) -> int:
        """A module begins to move to `host`, which holds `placed.num_blocks` for it; returns the blocks to
        copy. `model_after` where its weights travel: the model without them.

        One move at a time. From now on `copy_some` until little is left, then `switch`; or `cancel_move`.
        Raises MoveRefused, BadPlacement.
        """
        num_blocks: int = await self._move(lambda moves: moves.begin(placed, host, model_after))
        return num_blocks

    async def begin_return(self, move_id: str, *, model_after: Model | None = None) -> int:
        """The module that this move brought away begins to come home; goes on as after `begin_move`.
        `model_after` where its weights had travelled: the model with them. Raises MoveRefused.
        """
        num_blocks: int = await self._move(lambda moves: moves.begin_return(move_id, model_after))
        return num_blocks

    async def copy_some(self, move_id: str, max_bytes: int) -> CopyProgress:
        """Copies a piece of KV, at least a block, between two steps, or two layers of a long step.

        Raises MoveRefused, HostLost.
        """
        progress: CopyProgress = await self._ask(
            lambda core: core.move(lambda moves: moves.copy_some(move_id, max_bytes)),
            in_step=lambda core: core.moves.copy_in_step(move_id, max_bytes),
        )
        return progress

    async def switch(self, move_id: str) -> Switched:
        """Between two steps: the last of the KV, the new layout, the new placement.

        Waits until no step is put aside; cancel the move to end the wait. Raises MoveRefused, HostLost.
        """
        switched, pool = await self._ask(
            lambda core: (core.move(lambda moves: moves.switch(move_id)), core.pool)
        )
        await asyncio.to_thread(pool.touch_own)  # where weights left, the pool got memory never used before
        return cast("Switched", switched)

    async def cancel_move(self, move_id: str) -> None:
        """Nothing moves; no effect where it has switched, or never began."""
        await self._move(lambda moves: moves.cancel(move_id))

    async def lose_host(self, worker: str, why: str) -> None:
        """A host is gone: its modules are home again, without their KV.

        Sequences are computed again from their tokens; those that await KV from outside fail with PEER_LOST.
        No effect where it hosts nothing. Weights that travelled are read again on the engine's thread, which
        runs no step for as long as that takes: some 0.3 to 2 s. Where they cannot be read again the engine
        ends, with WeightsLost, and all sequences fail with PEER_LOST.
        """
        await self._ask(lambda core: core.lose_host(worker, why))

    async def _move(self, act: Callable[[Moves], Any]) -> Any:
        return await self._ask(lambda core: core.move(act))
