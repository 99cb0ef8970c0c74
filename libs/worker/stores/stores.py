"""All KV stores of the mesh: a prefix where there is one, a miss in every other case."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from libs.bus.bus import Bus
from libs.bus.messages.presence import Presence
from libs.bus.messages.store import FindPrefix
from libs.cost.estimators import FetchEstimator
from libs.cost.fetch import FetchCost
from libs.kv.runs import runs_by_store
from libs.kv.tensors import BlockShape
from libs.runtime.runtime import Spawn
from libs.transport.link_pool import LinkPool
from libs.transport.port import Transport
from libs.worker.settings import WorkerSettings
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.parallel_fetch import until_useless
from libs.worker.stores.peer import StorePeer
from libs.worker.stores.prefix_lookup import PrefixLookup, RunLookup, run_lookups
from libs.worker.stores.store_link import FetchResult, StoreLink, WriteBlocks
from libs.worker.stores.upload_part import UploadPart


@dataclass(frozen=True, slots=True)
class PromptAsked:
    """Whose blocks are sought, for the stores' access traces. `tenant` is opaque."""

    request_id: str = ""
    num_tokens: int = 0
    tenant: str = ""


class Stores:
    """By name. A store that is dead, slow or out of reach costs hits and nothing else."""

    def __init__(
        self,
        bus: Bus,
        transport: Transport,
        spawn: Spawn,
        metrics: StoreMetrics,
        settings: WorkerSettings,
        shape: BlockShape,
        num_layers: int,
    ) -> None:
        self._bus, self._transport, self._spawn = bus, transport, spawn
        self._metrics, self._settings = metrics, settings
        self._shape, self._num_layers = shape, num_layers
        self._peers: dict[str, StorePeer] = {}
        self._links: LinkPool[StoreLink] = LinkPool(spawn)
        self._estimator = FetchEstimator()
        self.num_fetching = 0
        """Prompts whose prefix is on its way."""

    @property
    def are_there(self) -> bool:
        """Whether asking is worth anything."""
        return bool(self._peers)

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self._num_layers * self._shape.num_bytes

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self._num_layers

    @property
    def fetch_cost(self) -> FetchCost:
        """As measured so far."""
        return self._estimator.cost

    def set_stores(self, ready: Sequence[Presence]) -> None:
        """The ready stores, in order of arrival. Of two with one name the later is the restarted one."""
        present = {presence.name: presence for presence in ready if presence.link_address}
        for name, peer in list(self._peers.items()):
            if name not in present or present[name].incarnation != peer.presence.incarnation:
                del self._peers[name]
                peer.leave()
        for name, presence in present.items():
            if name not in self._peers:
                self._peers[name] = self._peer(presence)
                self._peers[name].meet()

    async def find(
        self,
        names: Sequence[bytes],
        asked: PromptAsked,
        *,
        lease: bool = True,
        timeout_seconds: float = math.inf,
    ) -> PrefixLookup:
        """How much of this prompt is held where; the stores concerned are asked at once, and bring what is on
        disk into memory. Never raises for a store's sake, and never takes longer than the timeout."""
        timeout_seconds = min(timeout_seconds, self._settings.store_find_timeout_seconds)
        asking = (
            self._ask(store, runs, names, asked, lease, timeout_seconds)
            for store, runs in runs_by_store(names, sorted(self._peers)).items()
        )
        answers = await asyncio.gather(*asking)
        runs = sorted((run for own, _ in answers for run in own), key=lambda run: run.blocks.start)
        leases = [lease_seconds for _, lease_seconds in answers if lease_seconds is not None]
        return PrefixLookup(tuple(runs), time.monotonic(), min(leases, default=0.0))

    async def fetch(
        self,
        names: Sequence[bytes],
        found: PrefixLookup,
        blocks: range,
        write: WriteBlocks,
        *,
        timeout_seconds: float,
    ) -> FetchResult:
        """Have these blocks of a prompt written, all layers of each, from all stores at once, each layer by
        layer. After this returned nothing more is written. Never raises for a store's sake."""
        parts = found.by_store(blocks)
        self.num_fetching += 1
        num_sharing = self.num_fetching
        try:
            results = await until_useless(
                {
                    asyncio.ensure_future(
                        self._fetch_from(store, names, segments, write, timeout_seconds)
                    ): segments[0].start
                    for store, segments in parts.items()
                }
            )
        finally:
            self.num_fetching -= 1
        bad = [(start, result) for start, (result, _) in results.items() if result is not FetchResult.HIT]
        if bad:
            return min(bad, key=lambda one: one[0])[1]
        self._measure(found, blocks, max(seconds for _, seconds in results.values()), num_sharing)
        return FetchResult.HIT

    async def put(self, store: str, part: UploadPart) -> bool:
        """Whether these blocks were sent to the store of this name."""
        peer = self._peers.get(store)
        is_sent = peer is not None and await peer.put(part)
        self._metrics.puts.labels("sent" if is_sent else "dropped").inc(len(part.names))
        return is_sent

    async def _ask(
        self,
        store: str,
        runs: list[range],
        names: Sequence[bytes],
        asked: PromptAsked,
        lease: bool,
        timeout_seconds: float,
    ) -> tuple[list[RunLookup], float | None]:
        question = FindPrefix(
            names=b"".join(name for run in runs for name in names[run.start : run.stop]),
            run_lengths=tuple(map(len, runs)),
            run_starts=tuple(run.start for run in runs),
            lease=lease,
            request_id=asked.request_id,
            num_tokens=asked.num_tokens,
            tenant=asked.tenant,
        )
        peer = self._peers.get(store)  # It may have left since it was chosen.
        answer = await peer.find(question, timeout_seconds=timeout_seconds) if peer is not None else None
        return run_lookups(store, runs, answer), answer.lease_seconds if answer is not None else None

    async def _fetch_from(
        self,
        store: str,
        names: Sequence[bytes],
        segments: list[range],
        write: WriteBlocks,
        timeout_seconds: float,
    ) -> tuple[FetchResult, float]:
        peer = self._peers.get(store)
        if peer is None:
            return FetchResult.FAILED, 0.0
        wanted = [name for segment in segments for name in names[segment.start : segment.stop]]
        timeout = min(timeout_seconds, self._settings.store_fetch_timeout_seconds)
        return await peer.fetch(wanted, segments, write, timeout_seconds=timeout)

    def _measure(self, found: PrefixLookup, blocks: range, seconds: float, num_sharing: int) -> None:
        num_disk = found.num_on_disk(blocks)
        self._metrics.fetch_seconds.observe(seconds)
        self._metrics.fetched_blocks.labels("disk").inc(num_disk)
        self._metrics.fetched_blocks.labels("memory").inc(len(blocks) - num_disk)
        self._estimator.observe(
            len(blocks) * self.block_bytes,
            seconds,
            num_sharing=num_sharing,
            num_disk_bytes=num_disk * self.block_bytes,
        )

    def _peer(self, presence: Presence) -> StorePeer:
        return StorePeer(
            presence,
            self._bus,
            self._transport,
            self._links,
            self._spawn,
            self._metrics,
            self._shape,
            self._num_layers,
            timeout_seconds=self._settings.store_fetch_timeout_seconds,
        )
