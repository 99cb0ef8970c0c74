"""Router, workers and store as they really live, in one process: in-memory bus and Links, a tiny model."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from hosted import Hosted
from memory_broker import MemoryBroker
from memory_bus import MemoryBus
from memory_transport import MemoryNetwork, any_transport
from workers_gateway import Gateway
from workers_reference import BLOCK_SIZE, prompt_of, tiny_model

from libs.bus.messages.generation import TokenFrame
from libs.bus.messages.presence import ServiceKind
from libs.model.model import Model
from libs.runtime.identity import new_identity
from libs.runtime.life import Service
from libs.runtime.runtime import Runtime
from libs.runtime.settings import RuntimeSettings
from libs.transport.port import Transport
from libs.worker.worker import Worker
from services.decode_worker.settings import DecodeWorkerSettings
from services.kv_store.service import KvStoreService
from services.kv_store.settings import KvStoreSettings
from services.prefill_worker.settings import PrefillWorkerSettings
from services.router.service import RouterService
from services.router.settings import RouterSettings

__all__ = ["BLOCK_SIZE", "Gateway", "Hosted", "WorkersMesh", "prompt_of", "running_mesh"]

WrapTransport = Callable[[Transport], Transport]


class WorkersMesh:
    """What runs, by name."""

    def __init__(self) -> None:
        self.broker, self.network = MemoryBroker(), MemoryNetwork()
        self.hosted: dict[str, Hosted] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.gateways: list[Gateway] = []

    def open_transport(self, wrap: WrapTransport | None) -> Callable[[Any, Runtime], Transport]:
        def open_one(settings: RuntimeSettings, runtime: Runtime) -> Transport:
            transport = any_transport("memory", runtime.incarnation, b"secret", network=self.network)
            return wrap(transport) if wrap else transport

        return open_one

    @staticmethod
    async def open_model(settings: Any, runtime: Runtime) -> Model:
        return tiny_model()

    async def prefill(
        self, name: str = "prefill-0", *, wrap: WrapTransport | None = None, **settings: Any
    ) -> Hosted:
        made = PrefillWorkerSettings(
            **{
                "block_size": BLOCK_SIZE,
                "num_blocks": 256,
                "threads": 1,
                "max_num_batched_tokens": 32,
                "store_fetch_when": "always",
                "store_find_timeout_seconds": 5.0,
                **settings,
            }
        )
        service = Worker(made, open_model=self.open_model, open_transport=self.open_transport(wrap))
        hosted = await self.host(ServiceKind.PREFILL_WORKER, name, made, service)
        await self.until_linked(hosted, *self.live_stores())
        return hosted

    async def decode(
        self,
        name: str = "decode-0",
        *,
        wrap: WrapTransport | None = None,
        clock: Callable[[], float] = time.time,
        **settings: Any,
    ) -> Hosted:
        """Unless told, it puts nothing: what is in the store is then what prefill workers put."""
        made = DecodeWorkerSettings(
            **{
                "block_size": BLOCK_SIZE,
                "num_blocks": 256,
                "threads": 1,
                "store_fetch_when": "always",
                "store_find_timeout_seconds": 5.0,
                "store_finished": False,
                **settings,
            }
        )
        service = Worker(
            made, open_model=self.open_model, open_transport=self.open_transport(wrap), clock=clock
        )
        hosted = await self.host(ServiceKind.DECODE_WORKER, name, made, service)
        if made.store_finished or made.role == "both":
            await self.until_linked(hosted, *self.live_stores())
        return hosted

    async def store(
        self, name: str = "store-0", *, wrap: WrapTransport | None = None, **settings: Any
    ) -> Hosted:
        made = KvStoreSettings(**{"memory_gib": 0.01, "disk_gib": 0.0, **settings})
        return await self.host(
            ServiceKind.KV_STORE, name, made, KvStoreService(made, open_transport=self.open_transport(wrap))
        )

    async def router(self, name: str = "router-0", **settings: Any) -> Hosted:
        made = RouterSettings(**settings)
        return await self.host(ServiceKind.ROUTER, name, made, RouterService(made))

    async def gateway(self, name: str = "gateway-0") -> Gateway:
        gateway = Gateway(self.broker, name)
        await gateway.bus.subscribe(TokenFrame, gateway.hear, at=gateway.incarnation)
        self.tasks.append(asyncio.create_task(gateway.beat()))
        self.gateways.append(gateway)
        return gateway

    async def host(self, kind: ServiceKind, name: str, settings: Any, service: Service) -> Hosted:
        hosted = Hosted(service, new_identity(kind, name), MemoryBus(self.broker))
        self.hosted[name] = hosted
        await hosted.start(settings)
        return hosted

    async def stop(self, hosted: Hosted) -> int:
        return await hosted.end()

    async def kill(self, hosted: Hosted) -> None:
        """No good-bye on the bus; its Links break."""
        hosted.bus.disconnect()
        await hosted.end(drained=False)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for hosted in self.live():
            await hosted.end(drained=False)
        for gateway in self.gateways:
            await gateway.bus.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """States of several services have no common event; look again and again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110 - gauges announce nothing
                    await asyncio.sleep(0.005)
        assert condition()

    def live_stores(self) -> list[Hosted]:
        return [one for one in self.live() if one.identity.kind is ServiceKind.KV_STORE]

    def live(self) -> list[Hosted]:
        return [hosted for hosted in self.hosted.values() if hosted.is_alive]

    async def until_linked(self, worker: Hosted, *stores: Hosted) -> None:
        """Workers are ready before they have met all stores; what is not met costs hits."""
        peers = worker.service.stores._peers.values()
        await self.until(
            lambda: (
                {store.incarnation for store in stores}
                <= {peer.presence.incarnation for peer in peers if peer.is_connected}
            )
        )

    async def until_idle(self) -> None:
        """Every gauge that counts something held is back at nothing."""
        names = (
            "kvmesh_num_requests_running",
            "kvmesh_num_requests_waiting",
            "kvmesh_num_requests_reserved",
            "kvmesh_num_requests_held",
            "kvmesh_num_used_blocks",
            "kvmesh_num_unsent_deltas",
            "kvmesh_store_num_staged_blocks",
            "kvmesh_store_put_kept_bytes",
        )
        live = self.live()
        await self.until(lambda: all(hosted.gauge(name) == 0 for hosted in live for name in names))


@asynccontextmanager
async def running_mesh() -> AsyncGenerator[WorkersMesh]:
    mesh = WorkersMesh()
    try:
        yield mesh
    finally:
        await mesh.close()
