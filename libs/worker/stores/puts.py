"""New blocks of prompts on their way to the stores: in the background, and bounded."""

import asyncio
from collections.abc import Sequence

from libs.worker.stores.collected_put import CollectedPut
from libs.worker.stores.found import Found
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.peer import Spawn
from libs.worker.stores.put_part import PutPart
from libs.worker.stores.stores import Stores

MIB = 1 << 20


class Puts:
    """Beyond `max_mib` of KV kept, a prompt's blocks are not put."""

    def __init__(self, stores: Stores, spawn: Spawn, metrics: StoreMetrics, *, max_mib: int) -> None:
        self._stores, self._spawn, self._metrics = stores, spawn, metrics
        self._max_bytes = max_mib * MIB
        self.num_kept_bytes = 0
        """Of puts collected or on their way."""
        metrics.num_put_bytes.set_function(lambda: self.num_kept_bytes)

    def begin(self, names: Sequence[bytes], found: Found, request_id: str) -> CollectedPut | None:
        """Start to collect what stores lack of this prompt; None: that is nothing, or too much is kept."""
        if not found.missing:
            return None
        put = CollectedPut(names, found, self._stores.num_layers, request_id=request_id)
        if self.num_kept_bytes + self._bytes_of(put) > self._max_bytes:
            self._metrics.puts.labels("dropped").inc(len(put.blocks))
            return None
        self.num_kept_bytes += self._bytes_of(put)
        return put

    def end(self, put: CollectedPut) -> None:
        """Nothing more will be collected: it is sent if it is complete."""
        if put.is_complete:
            # Not given back in the task: one that is cancelled before its first step never gets there.
            task = self._spawn("store-put", self._send(put))
            task.add_done_callback(lambda _: self._let_go(put))
        else:
            self._metrics.puts.labels("dropped").inc(len(put.blocks))
            self._let_go(put)

    async def _send(self, put: CollectedPut) -> None:
        """Stores side by side, the parts of one in order: parents first."""
        by_store: dict[str, list[PutPart]] = {}
        for store, part in put.parts():
            by_store.setdefault(store, []).append(part)
        await asyncio.gather(*(self._send_all(store, parts) for store, parts in by_store.items()))

    async def _send_all(self, store: str, parts: list[PutPart]) -> None:
        for part in parts:
            await self._stores.put(store, part)

    def _let_go(self, put: CollectedPut) -> None:
        self.num_kept_bytes -= self._bytes_of(put)

    def _bytes_of(self, put: CollectedPut) -> int:
        return len(put.blocks) * self._stores.block_bytes
