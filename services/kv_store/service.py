"""The KV store on the bus: answers `FindPrefix`, heeds `GroupTtls`, tells what is here. Its peers' Links
carry the blocks."""

from collections.abc import Callable
from typing import NoReturn

from libs.bus.messages.presence import ServiceKind
from libs.bus.messages.store import BlocksCorrupt, FindPrefix, GroupTtls, PrefixHeld
from libs.bus.subscriptions import Subscription
from libs.config.errors import SettingsError
from libs.cost.load import WorkerLoad
from libs.kv.block_tree import MEMORY
from libs.kv_events.metrics import watch_publisher
from libs.kv_events.publisher import KvEventPublisher
from libs.kv_events.snapshots import Holdings
from libs.runtime.runtime import Runtime
from libs.transport.choose import make_transport
from libs.transport.port import Listener, Transport
from services.kv_store.disk.settings import SMALLEST_CAP_BYTES
from services.kv_store.disk.volume import FolderUnusable
from services.kv_store.holdings import holdings
from services.kv_store.metrics import KvStoreMetrics
from services.kv_store.peer import Peer, TokenBucket
from services.kv_store.readings import read_disk, read_memory, tier_loads
from services.kv_store.settings import KvStoreSettings
from services.kv_store.store import GIB, Store, open_disk, open_trace


def open_transport(settings: KvStoreSettings, runtime: Runtime) -> Transport:
    """This process's end of all Links. Raises ValueError without a secret."""
    return make_transport(settings.transport, runtime.incarnation, settings.link_secret.encode())


class KvStoreService:
    """One store. `open_transport` is the part that a test replaces."""

    def __init__(
        self,
        settings: KvStoreSettings,
        *,
        open_transport: Callable[[KvStoreSettings, Runtime], Transport] = open_transport,
    ) -> None:
        self._settings, self._open_transport = settings, open_transport
        self._bucket = TokenBucket(settings.fetch_bytes_per_second)
        self._store: Store | None = None
        self._transport: Transport | None = None
        self._listener: Listener | None = None
        self._publisher: KvEventPublisher | None = None
        self._subscriptions: list[Subscription] = []

    async def open(self, runtime: Runtime) -> None:
        """Find what the disk holds, listen, and tell where. Raises SettingsError."""
        self._runtime = runtime
        self._publisher = publisher = KvEventPublisher(
            runtime.bus, runtime.incarnation, ServiceKind.KV_STORE, self._held
        )
        watch_publisher(runtime.registry, publisher)
        self._metrics = KvStoreMetrics(runtime.registry)
        store = self._make_store(publisher)
        try:
            await store.open()
        except FolderUnusable as error:
            raise SettingsError(str(error)) from error
        self._store = store
        self._transport = transport = self._open_transport(self._settings, runtime)
        self._metrics.num_links.set_function(transport.num_open_links)
        read_memory(self._metrics, store)
        read_disk(self._metrics, store)
        self._listener = await transport.listen(self._settings.link_host)
        runtime.spawn("accept", self._accept(self._listener, store))
        self._subscriptions = [
            await runtime.bus.serve(FindPrefix, self._find, at=runtime.incarnation),
            await runtime.bus.subscribe(GroupTtls, store.accept_ttls),
            await runtime.bus.subscribe(BlocksCorrupt, store.rechecks.doubt, at=runtime.incarnation),
        ]
        await publisher.open()
        runtime.spawn("kv-events", publisher.run())
        runtime.describe(link_address=self._listener.address)

    async def drain(self) -> None:
        """Workers compute what they cannot fetch; only the disk is waited for."""
        if self._store is not None:
            await self._store.drain()

    async def close(self) -> None:
        """Stop answering, cut the Links, then let go of the blocks."""
        for subscription in self._subscriptions:
            await subscription.close()
        if self._publisher is not None:
            await self._publisher.close()
        if self._listener is not None:
            await self._listener.close()
        if self._transport is not None:
            await self._transport.close()
        if self._store is not None:
            await self._store.close()

    def load(self) -> WorkerLoad:
        """Blocks in memory, and about how many of their size it has room for."""
        if self._store is None:
            return WorkerLoad()
        blocks = self._store.blocks
        num_held = blocks.tree.num_in(MEMORY) + blocks.num_staged
        used = blocks.slab.num_used_bytes
        return WorkerLoad(
            num_blocks=blocks.slab.budget_bytes * num_held // used if used else 0,
            num_used_blocks=num_held,
            tiers=tier_loads(self._store),
        )

    def _make_store(self, publisher: KvEventPublisher) -> Store:
        settings, cap_bytes = self._settings, int(self._settings.disk_gib * GIB)
        if 0 < cap_bytes < SMALLEST_CAP_BYTES:
            raise SettingsError(
                f"disk_gib is {settings.disk_gib}; the least is {SMALLEST_CAP_BYTES / GIB:.3f}, or 0 for none"
            )
        name = self._runtime.identity.name
        disk, trace = open_disk(settings, name), open_trace(settings, name)
        return Store(settings, self._metrics, publisher, self._runtime.spawn, disk, trace)

    async def _accept(self, listener: Listener, store: Store) -> NoReturn:
        while True:
            link = await listener.accept()
            peer = Peer(link, store, self._metrics, self._settings.send_timeout_seconds, self._bucket)
            self._runtime.spawn("peer", peer.serve())

    async def _find(self, question: FindPrefix) -> PrefixHeld:
        if self._store is None:
            raise RuntimeError("asked before it is open")
        return self._store.find(question)

    async def _held(self, max_names: int | None) -> Holdings:
        return [] if self._store is None else await holdings(self._store.blocks.tree, max_names)
