"""Uploads of new blocks of prompts to the KV stores: in the background, and bounded."""

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from libs.runtime.runtime import Spawn
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.prefix_lookup import PrefixLookup, RunLookup
from libs.worker.stores.stores import Stores
from libs.worker.stores.upload_buffer import UploadBuffer
from libs.worker.stores.upload_part import UploadPart

MIB = 1 << 20
MAX_REMEMBERED = 4096
"""Runs sent lately: a prompt whose stores were asked before need not send them again."""


class KvUploads:
    """Beyond `max_mib` of KV kept, a prompt's blocks are not put."""

    def __init__(self, stores: Stores, spawn: Spawn, metrics: StoreMetrics, *, max_mib: int) -> None:
        self._stores, self._spawn, self._metrics = stores, spawn, metrics
        self._max_bytes = max_mib * MIB
        self.num_kept_bytes = 0
        """Of puts collected or on their way."""
        self._under_way = Counter[bytes]()
        """The last block of each run that is."""
        self._sent_at: OrderedDict[bytes, float] = OrderedDict()
        """The last block of each run that was sent lately, and when."""
        metrics.num_put_bytes.set_function(lambda: self.num_kept_bytes)

    def begin(self, names: Sequence[bytes], found: PrefixLookup, request_id: str) -> UploadBuffer | None:
        """Start to collect what stores lack of this prompt; None: that is nothing, or too much is kept."""
        found = replace(found, runs=tuple(self._without_what_others_put(names, found)))
        if not found.missing:
            return None
        put = UploadBuffer(names, found, self._stores.num_layers, request_id=request_id)
        if self.num_kept_bytes + self._bytes_of(put) > self._max_bytes:
            self._metrics.puts.labels("dropped").inc(len(put.blocks))
            return None
        self.num_kept_bytes += self._bytes_of(put)
        self._under_way.update(put.last_names)
        return put

    def end(self, put: UploadBuffer) -> None:
        """Nothing more will be collected: it is sent if it is complete."""
        if put.is_complete:
            # Not given back in the task: one that is cancelled before its first step never gets there.
            task = self._spawn("store-put", self._send(put))
            task.add_done_callback(lambda _: self._let_go(put))
        else:
            self._metrics.puts.labels("dropped").inc(len(put.blocks))
            self._let_go(put)

    async def _send(self, put: UploadBuffer) -> None:
        """Stores side by side, the parts of one in order: parents first."""
        by_store: dict[str, list[UploadPart]] = {}
        for store, part in put.parts():
            by_store.setdefault(store, []).append(part)
        await asyncio.gather(*(self._send_all(store, parts) for store, parts in by_store.items()))

    async def _send_all(self, store: str, parts: list[UploadPart]) -> None:
        for part in parts:
            if await self._stores.put(store, part):
                self._sent_at[part.names[-1]] = time.monotonic()
                while len(self._sent_at) > MAX_REMEMBERED:
                    self._sent_at.popitem(last=False)

    def _without_what_others_put(self, names: Sequence[bytes], found: PrefixLookup) -> Iterator[RunLookup]:
        """Of prompts that begin alike, one puts what they share."""
        for run in found.runs:
            last = names[run.missing[-1]] if run.missing else b""
            is_put = last in self._under_way or self._sent_at.get(last, -math.inf) >= found.at_seconds
            yield replace(run, num_held=len(run.blocks)) if is_put else run

    def _let_go(self, put: UploadBuffer) -> None:
        self.num_kept_bytes -= self._bytes_of(put)
        self._under_way.subtract(put.last_names)
        self._under_way += Counter()  # drops those at zero

    def _bytes_of(self, put: UploadBuffer) -> int:
        return len(put.blocks) * self._stores.block_bytes
