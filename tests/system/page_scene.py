"""A gateway that serves its page, on a bus in memory where a test says what the mesh tells."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from gateway_coordinator import Coordinator
from gateway_mesh import Mesh, running_gateway
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.message import Message
from libs.bus.messages.migration import PlacementUpdate
from libs.bus.messages.presence import ServiceKind
from libs.cost.load import WorkerLoad

START_TIMEOUT_SECONDS = 30.0


class Scene:
    """`running_scene` opens and ends it; the rest may be called from any thread."""

    mesh: Mesh
    coordinator: Coordinator

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None
        self._epoch = 0

    @property
    def url(self) -> str:
        return self.mesh.url

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(START_TIMEOUT_SECONDS), "the gateway does not become ready"
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def tell(self, *messages: Message) -> None:
        """Publish them in order."""
        asyncio.run_coroutine_threadsafe(self._publish(messages), self._loop).result(10)

    def load(self, name: str, load: WorkerLoad) -> None:
        workers = {worker.presence.name: worker for worker in (*self.mesh.prefills, *self.mesh.decodes)}
        asyncio.run_coroutine_threadsafe(workers[name].report(load), self._loop).result(10)

    def coordinator_leaves(self) -> None:
        asyncio.run_coroutine_threadsafe(self.coordinator.leave(), self._loop).result(10)

    def coordinator_comes(self) -> None:
        asyncio.run_coroutine_threadsafe(self.coordinator.open(), self._loop).result(10)

    async def _publish(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            if isinstance(message, PlacementUpdate):  # the newest counts, by its epoch
                self._epoch += 1
                placement = msgspec.structs.replace(message.placement, epoch=self._epoch)
                message = msgspec.structs.replace(message, placement=placement)
            await self.mesh.bus.publish(message)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._live())
            except BaseException as failure:  # noqa: BLE001 - told to the thread that waits
                self._failure = failure
            self._ready.set()

    async def _live(self) -> None:
        broker = MemoryBroker()
        bus = MemoryBus(broker)
        async with running_gateway(MemoryBus(broker), bus) as self.mesh:
            await self.mesh.add(ServiceKind.PREFILL_WORKER, "prefill-1")
            await self.mesh.add(ServiceKind.DECODE_WORKER, "decode-1")
            self.coordinator = Coordinator(bus)
            await self.coordinator.open()
            self._ready.set()
            await self._end.wait()


@contextmanager
def running_scene() -> Iterator[Scene]:
    scene = Scene()
    scene.start()
    try:
        yield scene
    finally:
        scene.end()
