"""Tells the mesh which blocks can be found in this worker's own pool."""

from collections.abc import Sequence

from libs.bus.messages.kv_events import Tier
from libs.engine.engine import Engine
from libs.kv_events.metrics import watch_publisher
from libs.kv_events.publisher import KvEventPublisher
from libs.kv_events.snapshots import Holdings
from libs.runtime.runtime import Runtime


class DeviceEvents:
    """`open` once the engine has started; `tell` may be called before."""

    def __init__(self, runtime: Runtime, engine: Engine) -> None:
        self._engine, self._runtime = engine, runtime
        self._publisher = KvEventPublisher(
            runtime.bus, runtime.incarnation, runtime.identity.kind, self._held
        )
        watch_publisher(runtime.registry, self._publisher)

    def tell(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """What one step changed."""
        if removed:
            self._publisher.removed(Tier.DEVICE, removed)
        if stored:
            self._publisher.stored(Tier.DEVICE, stored)

    async def open(self) -> None:
        """Answer snapshots, publish in the background."""
        await self._publisher.open()
        self._runtime.spawn("kv-events", self._publisher.run())

    async def close(self) -> None:
        """Answer no more."""
        await self._publisher.close()

    async def _held(self, _: int | None) -> Holdings:
        return [(Tier.DEVICE, await self._engine.held_names())]
