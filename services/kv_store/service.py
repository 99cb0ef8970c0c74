"""The KV store on the bus: answers `FindPrefix`; its peers' Links carry the blocks."""

import time
from collections.abc import Callable
from typing import NoReturn

from libs.bus.messages.presence import WorkerLoad
from libs.bus.messages.store import FindPrefix, PrefixHeld
from libs.bus.port import Subscription
from libs.kv.names import split_names
from libs.runtime.runtime import Runtime
from libs.transport.choose import make_transport
from libs.transport.port import Listener, Transport
from services.kv_store.dram_tier import DramTier
from services.kv_store.metrics import KvStoreMetrics
from services.kv_store.peer import Peer
from services.kv_store.settings import KvStoreSettings

GIB = 1 << 30


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
        self._tier = DramTier(int(settings.memory_gib * GIB))
        self._transport: Transport | None = None
        self._listener: Listener | None = None
        self._finding: Subscription | None = None

    async def open(self, runtime: Runtime) -> None:
        """Listen, and tell where."""
        self._runtime = runtime
        self._transport = transport = self._open_transport(self._settings, runtime)
        self._declare(KvStoreMetrics(runtime.registry), transport)
        self._listener = await transport.listen(self._settings.link_host)
        runtime.spawn("accept", self._accept(self._listener))
        self._finding = await runtime.bus.serve(FindPrefix, self._find, at=runtime.incarnation)
        runtime.describe(link_address=self._listener.address)

    async def drain(self) -> None:
        """Nothing here is anybody's request: workers compute what they cannot fetch."""

    async def close(self) -> None:
        """Stop answering, then cut the Links."""
        if self._finding is not None:
            await self._finding.close()
        if self._listener is not None:
            await self._listener.close()
        if self._transport is not None:
            await self._transport.close()

    def load(self) -> WorkerLoad:
        """Blocks held, and about how many of their size the budget has room for."""
        index = self._tier.index
        num_held = len(index) + index.num_staged
        capacity = index.budget_bytes * num_held // index.num_used_bytes if index.num_used_bytes else 0
        return WorkerLoad(num_blocks=capacity, num_used_blocks=num_held)

    async def _accept(self, listener: Listener) -> NoReturn:
        while True:
            peer = Peer(
                await listener.accept(), self._tier, self._metrics, self._settings.send_timeout_seconds
            )
            self._runtime.spawn("peer", peer.serve())

    async def _find(self, question: FindPrefix) -> PrefixHeld:
        names = split_names(question.names)
        lease_seconds = self._settings.lease_seconds if question.lease else 0.0
        held: list[int] = []
        start, now = 0, time.monotonic()
        for length in question.run_lengths:
            held.append(self._tier.find(names[start : start + length], now, lease_seconds))
            start += length
        self._metrics.queried_blocks.inc(len(names))
        self._metrics.found_blocks.inc(sum(held))
        return PrefixHeld(num_blocks=tuple(held), num_in_memory=tuple(held), lease_seconds=lease_seconds)

    def _declare(self, metrics: KvStoreMetrics, transport: Transport) -> None:
        self._metrics = metrics
        index = self._tier.index
        metrics.num_blocks.set_function(lambda: len(index))
        metrics.num_staged.set_function(lambda: index.num_staged)
        metrics.used_bytes.set_function(lambda: index.num_used_bytes)
        metrics.cache_usage.set_function(lambda: index.num_used_bytes / index.budget_bytes)
        metrics.num_links.set_function(transport.num_open_links)
