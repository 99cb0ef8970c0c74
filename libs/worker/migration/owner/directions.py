"""The two directions of a migration: what each asks of the host, of the weights and of the engine."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from libs.engine.errors import NoRoom
from libs.engine.hosting.port import HostLost
from libs.engine.migration.live_migration import LiveMigration
from libs.model.layer_weights import layer_tensors, layer_weight_bytes
from libs.model.model import Model
from libs.placement.placement import PlacedModule
from libs.worker.migration.framing import PIECE_BYTES
from libs.worker.migration.owner.remote_host import RemoteHost
from libs.worker.migration.threads import run_in_thread

CountWeights = Callable[[int], Awaitable[None]]
"""So many bytes of weights have travelled; returns when more may."""


class Direction(Protocol):
    """What a move does in its phases, apart from copying KV and switching, which is one for both."""

    @property
    def num_weight_bytes(self) -> int:
        """Of weights that travel, once they are reserved for."""
        ...

    async def reserve(self) -> None:
        """Make sure that there is room."""
        ...

    async def begin(self, count_weights: CountWeights) -> int:
        """Bring the weights, begin with the KV. Blocks to copy."""
        ...

    async def settle(self) -> None:
        """Returns when the host has done what it was asked so far."""
        ...

    async def release(self) -> None:
        """Free what moved where it was."""
        ...

    async def roll_back(self) -> None:
        """As if nothing had been begun."""
        ...


class _Beginning:
    """The engine's beginning of a move. It may wait its turn there, and comes to its end although nobody
    waits for it any more: a move is cancelled after it."""

    def __init__(self) -> None:
        self._task: asyncio.Task[int] | None = None

    async def run(self, begin: Coroutine[Any, Any, int]) -> int:
        """What it gives."""
        self._task = asyncio.create_task(begin)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    async def over(self) -> None:
        """Returns when it has ended, or was never asked for."""
        if self._task is not None:
            await asyncio.wait({self._task})


class Outbound:
    """From its owner to a host. `connect` gives the Link, a new one or one that stands."""

    def __init__(
        self,
        engine: LiveMigration,
        connect: Callable[[], Awaitable[RemoteHost]],
        placed: PlacedModule,
        *,
        num_blocks_least: int,
    ) -> None:
        self._engine, self._connect, self._placed = engine, connect, placed
        self._num_blocks_least = num_blocks_least
        self.num_weight_bytes = 0
        self._host: RemoteHost | None = None
        self._beginning = _Beginning()

    async def reserve(self) -> None:
        """See Direction. What is asked for is what the owner could make use of."""
        placed, engine = self._placed, self._engine
        wanted = placed.num_blocks or await engine.capacity_with(placed)
        if not placed.has_weights_at_owner:
            model = await engine.model_here()
            layer_bytes = layer_weight_bytes(model.config, model.dtype)
            self.num_weight_bytes = len(placed.module.layers) * layer_bytes
        self._host = await self._connect()
        try:
            num_blocks = await self._host.open(
                placed.move_id,
                placed.module,
                num_blocks_wanted=max(wanted, self._num_blocks_least),
                num_blocks_least=self._num_blocks_least,
                has_weights=not placed.has_weights_at_owner,
            )
        except NoRoom as refusal:
            if placed.num_blocks:
                raise
            hint = f"the home has {engine.num_total_blocks}: order it with --blocks (num_blocks) if fewer do"
            raise NoRoom(f"{refusal}; {hint}") from refusal
        self._placed = replace(placed, num_blocks=num_blocks)

    async def begin(self, count_weights: CountWeights) -> int:
        """See Direction."""
        placed, host, model_after = self._placed, self._opened(), None
        if not placed.has_weights_at_owner:
            model = await self._engine.model_here()
            for layer in placed.module.layers:
                tensors = await run_in_thread(partial(layer_tensors, model.layer(layer)))
                for name, tensor in tensors.items():
                    await self._send(host, layer, name, tensor, count_weights)
            model_after = model.without_layers(placed.module.layers)
        return await self._beginning.run(self._engine.begin_move(placed, host, model_after=model_after))

    async def settle(self) -> None:
        """See Direction."""
        await self._opened().settle()

    async def release(self) -> None:
        """See Direction. The switch gave the pool its new layout; weights go with the last who holds them."""

    async def roll_back(self) -> None:
        """See Direction."""
        await self._beginning.over()
        await self._engine.cancel_move(self._placed.move_id)
        if self._host is not None:
            with suppress(HostLost):  # nothing of it is left there then
                await self._host.close_module(self._placed.move_id)

    async def _send(
        self, host: RemoteHost, layer: int, name: str, tensor: torch.Tensor, count_weights: CountWeights
    ) -> None:
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
        for first in range(0, flat.numel(), PIECE_BYTES):
            piece = flat[first : first + PIECE_BYTES]
            await host.send_weights(self._placed.move_id, layer, name, first, piece)
            await count_weights(piece.numel())

    def _opened(self) -> RemoteHost:
        if self._host is None:
            raise RuntimeError("a module is reserved at its host before it is copied")
        return self._host


class Inbound:
    """Home again. `find` gives the Link that stands, if it does."""

    def __init__(
        self, engine: LiveMigration, find: Callable[[], RemoteHost | None], placed: PlacedModule
    ) -> None:
        self._engine, self._find, self._placed = engine, find, placed
        self.num_weight_bytes = 0  # they are read where the model was loaded from
        self._beginning = _Beginning()

    async def reserve(self) -> None:
        """See Direction. Where room is lacking the switch takes it from the youngest sequences."""

    async def begin(self, count_weights: CountWeights) -> int:
        """See Direction. Weights that travelled are read again from where the model was loaded."""
        model_after: Model | None = None
        if not self._placed.has_weights_at_owner:
            model, layers = await self._engine.model_here(), self._placed.module.layers
            loaded = await run_in_thread(partial(model.reload_layers, layers))
            model_after = model.with_layers(loaded)
        begin = self._engine.begin_return(self._placed.move_id, model_after=model_after)
        return await self._beginning.run(begin)

    async def settle(self) -> None:
        """See Direction. What is read is there when it was read."""

    async def release(self) -> None:
        """See Direction."""
        if (host := self._find()) is not None:
            with suppress(HostLost):  # nothing of it is left there then
                await host.close_module(self._placed.move_id)

    async def roll_back(self) -> None:
        """See Direction."""
        await self._beginning.over()
        await self._engine.cancel_move(self._placed.move_id)
