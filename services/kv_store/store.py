"""Both tiers as one: what is asked, put and fetched goes through here, and so does all that follows from it:
loading, writing, expiry, trace. The bytes travel elsewhere."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from libs.bus.messages.kv_events import Tier
from libs.bus.messages.store import FindPrefix, GroupTtls, PrefixHeld
from libs.kv.access_trace import TraceLine, hash_ids
from libs.kv.block_tree import DISK, MEMORY, TreeFull
from libs.kv.group_ttl import GroupTtl
from libs.kv.names import NAME_BYTES, split_names
from libs.kv_events.publisher import KvEventPublisher
from libs.runtime.runtime import Spawn
from libs.transport.frames import PutNames
from services.kv_store.disk.blocks import DiskBlock
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.disk.settings import DiskSettings
from services.kv_store.disk_writer import DiskWriter
from services.kv_store.held_blocks import HeldBlocks, Nodes, Put, PutRefused
from services.kv_store.loading import Load, Loader
from services.kv_store.metrics import KvStoreMetrics
from services.kv_store.rechecks import Rechecks
from services.kv_store.settings import KvStoreSettings
from services.kv_store.slab import make_memory
from services.kv_store.trace_file import TraceFile

GIB, MIB = 1 << 30, 1 << 20
BLOCK_BYTES_AT_LEAST = 2048
"""Blocks are larger than this, all layers together, or fewer are held than would fit."""
MIN_BLOCKS, MAX_BLOCKS = 1 << 16, 1 << 24
SWEEP_NODES, SWEEP_SECONDS = 1 << 15, 0.2
AT_ONCE = 256
"""Blocks adopted or expired before others get their turn."""


class Store:
    """`await open()`, use, `await drain()`, `await close()`."""

    def __init__(
        self,
        settings: KvStoreSettings,
        metrics: KvStoreMetrics,
        events: KvEventPublisher,
        spawn: Spawn,
        disk: DiskTier | None,
        trace: TraceFile | None,
    ) -> None:
        self._settings, self._metrics, self._events, self._spawn = settings, metrics, events, spawn
        budget_bytes = int(settings.memory_gib * GIB)
        num_fitting = (budget_bytes + int(settings.disk_gib * GIB)) // BLOCK_BYTES_AT_LEAST
        self.blocks = HeldBlocks(
            budget_bytes,
            capacity=min(MAX_BLOCKS, max(MIN_BLOCKS, num_fitting)),
            eviction=settings.eviction,
            on_stored=events.stored,
            on_removed=self._on_removed,
        )
        self.ttl = GroupTtl(self.blocks.tree, settings.ttl_seconds or None)
        self.disk = disk
        self.loader = Loader(self.blocks, disk, self._spawn_load, metrics.promoted.inc) if disk else None
        self.writer = DiskWriter(self.blocks, disk, settings.write_policy) if disk else None
        self.rechecks = Rechecks(self.blocks)
        self.trace = trace
        self.num_asked_blocks = 0
        self.num_hit_blocks = {MEMORY: 0, DISK: 0}
        """By the fastest tier that had them."""
        self._page_due = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Life

    async def open(self) -> None:
        """Find what the disk holds. Raises FolderUnusable."""
        if self.disk is not None and self.writer is not None:
            await self._adopt(await self.disk.open())
            self._run("disk", self.disk.run(self.writer.on_resumed))
            self._run("disk-writer", self.writer.run())
        if self.trace is not None:
            self._run("access-trace", self.trace.run())
        self._run("rechecks", self.rechecks.run())
        self._run("expiry", self._expire())
        self._run("pages", self._make_pages())

    async def drain(self) -> None:
        """Returns when all is on disk that should be."""
        if self.writer is not None:
            await self.writer.flush()

    async def close(self) -> None:
        """What waits is lost, what is on disk stays."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.trace is not None:
            await self.trace.flush()
        if self.disk is not None:
            await self.disk.close()

    # Use

    def find(self, question: FindPrefix) -> PrefixHeld:
        """How much of these runs is held. What lies on disk alone is on its way into memory from now on.

        Raises ValueError for lengths that do not fit the names, and starts that do not fit the lengths.
        """
        names, now = split_names(question.names), time.monotonic()
        if sum(question.run_lengths) != len(names) or min(question.run_lengths, default=0) < 0:
            raise ValueError(f"runs of {question.run_lengths} blocks, but {len(names)} names")
        if len(question.run_starts) not in (0, len(question.run_lengths)):
            raise ValueError(f"{len(question.run_lengths)} runs that begin at {question.run_starts}")
        lease_seconds = self._settings.lease_seconds if question.lease else 0.0
        # Who only asks what to put gives no hit and leaves no trace.
        is_lookup = question.lease or question.num_tokens > 0
        held, in_memory, start = list[int](), list[int](), 0
        nodes: list[Nodes] = []
        for length in question.run_lengths:
            run = names[start : start + length]
            found = self.blocks.find(run, now, lease_seconds, is_hit=is_lookup)
            held.append(found.nodes.size)
            in_memory.append(found.num_in_memory)
            nodes.append(found.nodes)
            start += length
        joined = np.concatenate(nodes) if nodes else np.empty(0, dtype=np.int64)
        if is_lookup:
            self._note_found(question, names, joined)
            if self.writer is not None:
                self.writer.on_hit(joined)
        if self.loader is not None and question.lease:
            self.loader.prefetch(joined, now)
        return PrefixHeld(num_blocks=tuple(held), num_in_memory=tuple(in_memory), lease_seconds=lease_seconds)

    def begin_put(self, header: PutNames, names: Sequence[bytes]) -> Put:
        """Make room. Raises PutRefused."""
        if header.num_blocks != len(names) or len(header.parent) not in (0, NAME_BYTES):
            raise PutRefused(f"{len(names)} names for {header.num_blocks} blocks, or a parent without name")
        self._page_due.set()
        shape = header.num_layers, header.layer_bytes
        return self.blocks.begin_put(names, shape, time.monotonic(), parent=header.parent)

    def commit(self, put: Put, header: PutNames) -> None:
        """All layers are there."""
        nodes = self.blocks.commit(put, time.monotonic())
        if self.writer is not None:
            self.writer.on_put(nodes)
        if self.trace is not None:
            self.trace.add(
                TraceLine(
                    timestamp=time.time() * 1e3,
                    output_length=header.num_output_tokens,
                    hash_ids=hash_ids(put.names),
                    kind="put",
                    group=self._group_of(nodes),
                    request_id=header.request_id,
                )
            )

    def begin_fetch(self, names: Sequence[bytes]) -> Nodes | None:
        """Keep these until `end_fetch`, and bring them into memory; None where some are missing."""
        now = time.monotonic()
        nodes = self.blocks.begin_fetch(names, now)
        if nodes is not None and self.loader is not None:
            self.loader.load(nodes, now)
        return nodes

    def accept_ttls(self, message: GroupTtls) -> None:
        """TTLs as the mesh wants them."""
        if self.ttl.accept(message.epoch, message.rest_ttl_seconds, message.ttl_seconds):
            self._metrics.ttl_epoch.set(message.epoch)

    # Inside

    def _run(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._spawn(name, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn_load(self, load: Load) -> None:
        if self.loader is not None:
            self._run("load", self.loader.run(load))

    def _on_removed(self, tier: Tier, names: Sequence[bytes]) -> None:
        self._events.removed(tier, names)
        if tier is Tier.DISK and self.writer is not None:
            self.writer.remove(names)

    def _note_found(self, question: FindPrefix, names: Sequence[bytes], nodes: Nodes) -> None:
        num_in_memory = int(np.count_nonzero(self.blocks.tree.are_in(nodes, MEMORY)))
        self.num_asked_blocks += len(names)
        self.num_hit_blocks[MEMORY] += num_in_memory
        self.num_hit_blocks[DISK] += nodes.size - num_in_memory
        self._metrics.queried_blocks.inc(len(names))
        self._metrics.found_blocks.inc(nodes.size)
        self._metrics.tier_hits.labels("dram").inc(num_in_memory)
        self._metrics.tier_hits.labels("disk").inc(nodes.size - num_in_memory)
        self._metrics.tier_misses.labels("dram").inc(len(names) - num_in_memory)
        if self.disk is not None:
            self._metrics.tier_misses.labels("disk").inc(len(names) - nodes.size)
        if self.trace is not None:
            self.trace.add(
                TraceLine(
                    timestamp=time.time() * 1e3,
                    input_length=question.num_tokens,
                    hash_ids=hash_ids(names),
                    run_starts=question.run_starts,
                    run_lengths=question.run_lengths if question.run_starts else (),
                    num_memory_hits=num_in_memory,
                    num_disk_hits=nodes.size - num_in_memory,
                    group=self._group_of(nodes),
                    tenant=question.tenant,
                    request_id=question.request_id,
                )
            )

    def _group_of(self, nodes: Nodes) -> str:
        return self.ttl.group_name_of(int(nodes[-1])).hex() if nodes.size else ""

    async def _adopt(self, held: Sequence[DiskBlock]) -> None:
        """Blocks of an earlier life."""
        age_from = time.time() - time.monotonic()
        for start in range(0, len(held), AT_ONCE):
            adopted = [
                block.name for block in held[start : start + AT_ONCE] if self._adopt_one(block, age_from)
            ]
            self._events.stored(Tier.DISK, adopted)
            await asyncio.sleep(0)

    def _adopt_one(self, block: DiskBlock, age_from: float) -> bool:
        try:
            shape = self.blocks.shape_number((block.num_layers, block.layer_bytes))
            node = self.blocks.tree.add(block.name, block.parent, DISK, block.written_at_unix - age_from)
        except (TreeFull, PutRefused):
            if self.writer is not None:
                self.writer.remove([block.name])
            return False
        self.blocks.tree.shape[node] = shape
        self.blocks.tree.num_hits[node] = block.num_hits
        return True

    async def _expire(self) -> None:
        """For ever: drop what was unused for longer than its group is kept."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self.ttl.is_endless:
                continue
            due = self.ttl.sweep(time.monotonic(), SWEEP_NODES)
            for start in range(0, len(due), AT_ONCE):
                now = time.monotonic()
                for node in due[start : start + AT_ONCE]:
                    self._drop_expired(self.ttl.expired_chain(node, now))
                await asyncio.sleep(0)

    def _drop_expired(self, chain: Sequence[int]) -> None:
        for node in chain:
            self.blocks.drop_everywhere(node)
        self._metrics.expired.inc(len(chain))

    async def _make_pages(self) -> NoReturn:
        """For ever: have the next page of memory ready before it is needed."""
        while True:
            num_bytes = self.blocks.slab.page_to_make()
            if num_bytes:
                self.blocks.slab.keep(await asyncio.to_thread(make_memory, num_bytes, touched=True))
            self._page_due.clear()
            await self._page_due.wait()


def open_disk(settings: KvStoreSettings, name: str) -> DiskTier | None:
    """The tier on disk, as the settings want it; None without one."""
    if settings.disk_gib <= 0:
        return None
    folder = (Path(settings.disk_path) if settings.disk_path else Path(settings.state_dir) / "kv") / name
    disk_settings = DiskSettings(
        cap_bytes=int(settings.disk_gib * GIB),
        fsync=settings.fsync,
        index_folder=Path(settings.index_path) / name if settings.index_path else None,
        index_cache_bytes=settings.index_cache_mib * MIB,
    )
    return DiskTier(folder, disk_settings)


def open_trace(settings: KvStoreSettings, name: str) -> TraceFile | None:
    """The access trace, as the settings want it: in a folder each store has a file of its own."""
    if not settings.access_trace:
        return None
    path = Path(settings.access_trace)
    if settings.access_trace.endswith("/") or path.is_dir():
        path /= f"{name}.jsonl"
    return TraceFile(path, settings.access_trace_mib * MIB)
