"""Hosting as services see it: an engine takes in modules of other workers' instances."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import Answer
from libs.engine.memory.pool import Pool
from libs.model.model import Layer
from libs.placement.module import Module
from libs.placement.placement import HostedModuleStatus

Ask = Callable[[Callable[[HostedModules], Any]], Awaitable[Any]]
"""Does something on the engine's thread; gives what it returned, raises what it raised, and EngineClosed."""


class Hosting:
    """Methods are called on the event loop of the engine, but for `call`, which any thread may."""

    def __init__(
        self,
        ask: Ask,
        call: Callable[[str, HostedCall, Answer], None],
        hosted: Callable[[], tuple[HostedModuleStatus, ...]],
    ) -> None:
        self._ask = ask
        self.call = call
        """Queues a call of this owner after those it made before; the answer is given when it is done. Never
        waits."""
        self.hosted = hosted
        """All modules here."""

    @property
    def num_bytes(self) -> int:
        """Memory that all modules take here, KV and weights."""
        return sum(one.num_bytes for one in self.hosted())

    async def open(
        self,
        owner: str,
        move_id: str,
        module: Module,
        *,
        num_blocks_wanted: int,
        num_blocks_least: int,
        layers: Mapping[int, Layer] | None = None,
        weight_bytes: int = 0,
    ) -> int:
        """Makes room for a module; returns how many blocks it has, from least to wanted.

        LAYERS run with `layers`, whose `weight_bytes` count as taken here; they may come into the mapping
        later, before the first call that needs them. Without `layers` they run with own weights.

        Raises:
            MoveRefused: the model has no such module, its weights are not here, or the id is in use.
            NoRoom: too few blocks can be spared.
        """

        def act(modules: HostedModules) -> tuple[int, HostedModules]:
            granted = modules.open(
                owner,
                move_id,
                module,
                num_blocks_wanted=num_blocks_wanted,
                num_blocks_least=num_blocks_least,
                layers=layers,
                weight_bytes=weight_bytes,
            )
            return granted, modules

        num_blocks, modules = await self._ask(act)
        await asyncio.to_thread(modules.touch, owner, move_id)
        return int(num_blocks)

    async def close(self, owner: str, move_id: str) -> None:
        """Frees a module. Unknown ones are ignored."""
        await self._free(lambda modules: modules.close(owner, move_id))

    async def close_owner(self, owner: str) -> None:
        """Frees all that this owner has here, and fails what it waits for."""
        await self._free(lambda modules: modules.close_owner(owner))

    async def _free(self, act: Callable[[HostedModules], None]) -> None:
        def free(modules: HostedModules) -> Pool:
            act(modules)
            return modules.pool

        pool: Pool = await self._ask(free)
        await asyncio.to_thread(pool.touch_own)
