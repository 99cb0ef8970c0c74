"""A service as it really lives, on the in-memory bus, with its runtime at hand."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from memory_bus import MemoryBus
from prometheus_client import CollectorRegistry

from libs.bus.messages.presence import Presence, ServiceState
from libs.runtime.identity import Identity
from libs.runtime.life import Stop
from libs.runtime.runtime import Runtime
from libs.runtime.service import live_on

PREFIX = "kvmesh_"


@dataclass
class Hosted:
    service: Any
    identity: Identity
    bus: MemoryBus
    stop: Stop = field(default_factory=Stop)
    runtime: Runtime | None = None
    task: "asyncio.Task[int] | None" = None

    def __post_init__(self) -> None:
        if hasattr(self.service, "load"):
            self.load = self.service.load

    def begin(self, settings: Any) -> "asyncio.Task[int]":
        """Its life, from now on."""
        self.task = asyncio.create_task(
            live_on(self.bus, self.identity, settings, self, self.stop, serves_probes=False)
        )
        return self.task

    async def start(self, settings: Any) -> None:
        """Returns when it is ready."""
        task = self.begin(settings)
        async with asyncio.timeout(20):
            while self.runtime is None or self.presence.state is not ServiceState.READY:
                assert not task.done(), f"{self.identity.name} did not start"
                await asyncio.sleep(0.005)

    async def open(self, runtime: Runtime) -> None:
        self.runtime = runtime
        await self.service.open(runtime)

    async def drain(self) -> None:
        await self.service.drain()

    async def close(self) -> None:
        await self.service.close()

    async def end(self, *, drained: bool = True) -> int:
        self.stop.skip_drain = not drained
        self.stop.asked.set()
        assert self.task is not None
        code = await self.task
        await self.bus.close()
        return code

    @property
    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def incarnation(self) -> str:
        return self.identity.incarnation

    @property
    def presence(self) -> Presence:
        assert self.runtime is not None
        return self.runtime.presence

    @property
    def registry(self) -> CollectorRegistry:
        assert self.runtime is not None
        return self.runtime.registry

    def gauge(self, name: str, **labels: str) -> float:
        """Of any kind of metric; their common prefix may be left out. 0 where there is none."""
        return self.registry.get_sample_value(f"{PREFIX}{name.removeprefix(PREFIX)}", labels) or 0.0
