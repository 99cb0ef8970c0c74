"""Live migration of this instance's modules as services see it; on the engine's thread `Migrator` does it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from libs.cost.load import WorkerLoad
from libs.engine.hosting.port import Host
from libs.engine.outputs import CopyProgress, Switched
from libs.model.model import Model
from libs.placement.placement import PlacedModule, Placement

Ask = Callable[..., Awaitable[Any]]
"""Does something with the `Migrator` between two steps, and what is `in_step` also between two layers."""


class LiveMigration:
    """Methods are called on the event loop of the engine. All raise EngineClosed, EngineDied."""

    def __init__(self, ask: Ask, load: Callable[[], WorkerLoad], placement: Placement) -> None:
        self._ask, self._load = ask, load
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
        return self._load().num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, as of the last step; blocks kept by hash only are free."""
        load = self._load()
        return load.num_blocks - load.num_used_blocks

    async def model_here(self) -> Model:
        """The model, less the layers whose weights are elsewhere."""
        model: Model = await self._ask(lambda migrator: migrator.model)
        return model

    async def capacity_with(self, placed: PlacedModule) -> int:
        """Blocks that this worker's own memory would hold after that migration: what to ask the host for.

        Of remote blocks: those here, without any remote ones. Raises BadPlacement.
        """
        num_blocks: int = await self._ask(lambda migrator: migrator.layout.capacity_with(placed))
        return num_blocks

    async def begin_move(self, placed: PlacedModule, host: Host, *, model_after: Model | None = None) -> int:
        """A module begins to move to `host`, which holds `placed.num_blocks` for it; returns the blocks to
        copy. `model_after` where its weights travel: the model without them.

        One migration at a time. From now on `copy_some` until little is left, then `switch`; or
        `cancel_move`. Raises MoveRefused, BadPlacement.
        """
        num_blocks: int = await self._ask(lambda migrator: migrator.begin(placed, host, model_after))
        return num_blocks

    async def begin_return(self, move_id: str, *, model_after: Model | None = None) -> int:
        """The module of this migration begins to move back from its host; goes on as after `begin_move`.
        `model_after` where its weights had travelled: the model with them. Raises MoveRefused.
        """
        num_blocks: int = await self._ask(lambda migrator: migrator.begin_return(move_id, model_after))
        return num_blocks

    async def copy_some(self, move_id: str, max_bytes: int) -> CopyProgress:
        """Copies a piece of KV, at least a block, between two steps, or two layers of a long step.

        Raises MoveRefused, HostLost.
        """
        progress: CopyProgress = await self._ask(
            lambda migrator: migrator.copy_some(move_id, max_bytes),
            in_step=lambda migrator: migrator.copy_in_step(move_id, max_bytes),
        )
        return progress

    async def switch(self, move_id: str) -> Switched:
        """Between two steps: the last of the KV, the new layout, the new placement.

        Waits until no step is put aside; cancel the migration to end the wait. Raises MoveRefused, HostLost.
        """
        switched: Switched
        switched, pool = await self._ask(lambda migrator: (migrator.switch(move_id), migrator.layout.pool))
        await asyncio.to_thread(pool.touch_own)  # where weights left, the pool got memory never used before
        return switched

    async def cancel_move(self, move_id: str) -> None:
        """Ends the migration; no effect where it has switched, or never began."""
        await self._ask(lambda migrator: migrator.cancel(move_id))

    async def lose_host(self, worker: str, why: str) -> None:
        """A host is gone: its modules are back here, without their KV.

        Sequences are computed again from their tokens; those that await KV from outside fail with PEER_LOST.
        No effect where it hosts nothing. Weights that travelled are read again on the engine's thread, which
        runs no step for as long as that takes: some 0.3 to 2 s. Where they cannot be read again the engine
        ends, with WeightsLost, and all sequences fail with PEER_LOST.
        """
        await self._ask(lambda migrator: migrator.lose_host(worker, why))
