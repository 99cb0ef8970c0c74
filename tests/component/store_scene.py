"""A KV store as it really lives, on the in-memory bus and Links, and a worker's side of its Links."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from hosted import Hosted
from memory_broker import MemoryBroker
from memory_bus import MemoryBus
from memory_transport import MemoryNetwork, any_transport
from numpy.typing import NDArray

from libs.bus.messages.kv_events import KvEvents
from libs.bus.messages.presence import ServiceKind
from libs.bus.messages.store import FindPrefix, PrefixHeld
from libs.kv.checksum import block_checksums, checksum_of_blocks
from libs.kv.layer_groups import layer_groups
from libs.runtime.identity import new_identity
from libs.runtime.runtime import Runtime
from libs.transport.frames import (
    Fetch,
    Fetched,
    FetchMissed,
    FrameHeader,
    PutLayer,
    PutNames,
    decode_header,
    encode_header,
)
from libs.transport.port import Link, Transport
from services.kv_store.service import KvStoreService
from services.kv_store.settings import KvStoreSettings

NUM_LAYERS, LAYER_BYTES = 4, 4096
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES
GIB = 1 << 30
SECRET = b"a secret of the test"


def names_of(chain: int, num_blocks: int, first: int = 0) -> list[bytes]:
    return [
        bytes([(chain * 31 + i) % 256]) + chain.to_bytes(7, "little") + i.to_bytes(8, "little")
        for i in range(first, first + num_blocks)
    ]


def content(name: bytes, layer: int) -> NDArray[np.uint8]:
    """What this block holds in this layer; every byte depends on both."""
    seed = int.from_bytes(name, "little") * 64 + layer
    return np.random.default_rng(seed).integers(0, 256, LAYER_BYTES, dtype=np.uint8)


class Worker:
    """Puts and fetches over one Link, and checks every byte."""

    def __init__(self, link: Link, bus: MemoryBus, store: Hosted) -> None:
        self.link, self.bus, self.store = link, bus, store
        self._ids = count(1)

    async def send(self, header: FrameHeader, body: NDArray[np.uint8] | None = None) -> None:
        await self.link.send(encode_header(header), body, timeout_seconds=5)

    async def put(self, names: Sequence[bytes], parent: bytes = b"", **more: Any) -> None:
        """Send a whole put; `settled` says when it is taken."""
        put_id = next(self._ids)
        header = PutNames(
            put_id=put_id,
            num_blocks=len(names),
            num_layers=NUM_LAYERS,
            layer_bytes=LAYER_BYTES,
            parent=parent,
            **more,
        )
        await self.send(header, np.frombuffer(b"".join(names), dtype=np.uint8))
        for layers in layer_groups(NUM_LAYERS, LAYER_BYTES * len(names)):
            body = np.concatenate([content(name, layer) for layer in layers for name in names])
            proof = checksum_of_blocks(block_checksums(body, len(layers) * len(names)))
            layer = PutLayer(put_id=put_id, layer=layers.start, num_layers=len(layers), checksum=proof)
            await self.send(layer, body)

    async def fetch(self, names: Sequence[bytes]) -> bool:
        """True: all layers came, right; False: missed."""
        fetch_id = await self.ask(names)
        left = NUM_LAYERS
        while left:
            frame = await self.link.receive(timeout_seconds=10)
            header = decode_header(frame.header)
            if isinstance(header, FetchMissed):
                assert header.fetch_id == fetch_id
                return False
            assert isinstance(header, Fetched)
            assert (header.fetch_id, header.num_blocks) == (fetch_id, len(names))
            assert header.layer == NUM_LAYERS - left
            self.check(header, frame.body, names)
            frame.release()
            left -= header.num_layers
        return True

    async def ask(self, names: Sequence[bytes]) -> int:
        fetch_id = next(self._ids)
        fetch = Fetch(fetch_id=fetch_id, num_blocks=len(names))
        await self.send(fetch, np.frombuffer(b"".join(names), dtype=np.uint8))
        return fetch_id

    def check(self, header: Fetched, body: NDArray[np.uint8], names: Sequence[bytes]) -> None:
        layers = range(header.layer, header.layer + header.num_layers)
        expected = np.concatenate([content(name, layer) for layer in layers for name in names])
        assert np.array_equal(body, expected)
        assert checksum_of_blocks(block_checksums(body, len(layers) * len(names))) == header.checksum

    async def find(self, *runs: Sequence[bytes], lease: bool = True, **more: Any) -> PrefixHeld:
        question = FindPrefix(
            names=b"".join(name for run in runs for name in run),
            run_lengths=tuple(map(len, runs)),
            lease=lease,
            **more,
        )
        return await self.bus.request(question, to=self.store.incarnation, timeout_seconds=5)

    async def held(self, names: Sequence[bytes]) -> tuple[int, int]:
        """How many of the first are held, and how many of those in memory; nothing is moved by asking."""
        answer = await self.find(names, lease=False)
        return answer.num_blocks[0], answer.num_in_memory[0]


class StoreScene:
    """One broker, one network; stores and workers on them."""

    def __init__(self) -> None:
        self.broker, self.network = MemoryBroker(), MemoryNetwork()
        self.stores: list[Hosted] = []
        self.events: list[KvEvents] = []
        self._closers: list[Callable[[], Any]] = []

    async def store(
        self, *, memory_blocks: int = 64, disk_mib: int = 0, folder: Path | None = None, **settings: Any
    ) -> Hosted:
        made = KvStoreSettings(
            memory_gib=memory_blocks * BLOCK_BYTES / GIB,
            disk_gib=disk_mib / 1024,
            disk_path=str(folder) if folder else "",
            **settings,
        )

        def open_transport(_: KvStoreSettings, runtime: Runtime) -> Transport:
            return any_transport("memory", runtime.incarnation, SECRET, network=self.network)

        identity = new_identity(ServiceKind.KV_STORE, "store-0")
        store = Hosted(KvStoreService(made, open_transport=open_transport), identity, MemoryBus(self.broker))
        self.stores.append(store)
        await store.start(made)
        return store

    async def worker(self, store: Hosted, name: str = "worker") -> Worker:
        transport = any_transport("memory", f"{name}-1", SECRET, network=self.network)
        link = await transport.connect(store.presence.link_address, timeout_seconds=5)
        bus = MemoryBus(self.broker)
        self._closers += [transport.close, bus.close]
        return Worker(link, bus, store)

    async def listen(self) -> None:
        """Keep the KV events that come from now on."""
        bus = MemoryBus(self.broker)
        await bus.subscribe(KvEvents, self.events.append)
        self._closers.append(bus.close)

    async def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Gauges announce nothing; look again and again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110 - gauges announce nothing
                    await asyncio.sleep(0.002)
        assert condition()

    async def close(self) -> None:
        for close in self._closers:
            await close()
        for store in self.stores:
            if store.is_alive:
                assert await store.end(drained=False) == 0


@asynccontextmanager
async def store_scene() -> AsyncGenerator[StoreScene]:
    scene = StoreScene()
    try:
        yield scene
    finally:
        await scene.close()
