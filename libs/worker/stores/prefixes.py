"""The prefix of a prompt as the stores have it: sought when the prompt arrives, fetched where that is faster
than to compute it."""

import asyncio
import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from libs.cost.fetch import fetch_seconds
from libs.cost.plan_fetch import FetchPlan, FetchReason, plan_fetch
from libs.cost.prefill import prefill_seconds
from libs.engine.engine import Engine
from libs.kv.names import block_names
from libs.request.generation import Generation, num_tokens
from libs.worker.settings import WorkerSettings
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.prefix_lookup import PrefixLookup
from libs.worker.stores.store_link import FetchResult
from libs.worker.stores.stores import PromptAsked, Stores

LEAST_FIND_SECONDS = 0.1
"""A prompt waits for the stores' answers no longer than it would take to compute, but at least so long."""
LEAST_FETCH_SECONDS = 0.25
PATIENCE = 4.0
"""A fetch that takes so many times as long as predicted is given up."""


@dataclass(slots=True, eq=False)
class Prefix:
    """One prompt's full blocks by name, and what was found of them."""

    generation: Generation
    names: list[bytes]
    num_findable: int
    """Blocks that need not be computed: all but the one with the last token."""
    found: PrefixLookup = field(default_factory=PrefixLookup)


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """Blocks that a prompt is fetching, and when that has ended."""

    names: list[bytes]
    blocks: range
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Prefixes:
    """For one engine."""

    def __init__(
        self,
        stores: Stores,
        metrics: StoreMetrics,
        settings: WorkerSettings,
        *,
        fingerprint: str,
        engine: Engine,
    ) -> None:
        self._stores, self._metrics, self._settings = stores, metrics, settings
        self._fingerprint, self._engine = fingerprint, engine
        self._claims: list[_Claim] = []

    def of(self, generation: Generation) -> Prefix:
        """Not sought yet; without stores its blocks are not even named."""
        size = self._settings.block_size
        names: list[bytes] = []
        if self._stores.are_there:
            token_ids = np.frombuffer(generation.token_ids, dtype="<i4")
            names = block_names(token_ids, size, self._fingerprint, generation.cache_salt)
        return Prefix(generation, names, min(len(names), (num_tokens(generation) - 1) // size))

    async def find(self, prefix: Prefix) -> None:
        """Ask the stores, which also makes them bring it into memory. Never raises for a store's sake."""
        generation = prefix.generation
        length = num_tokens(generation)
        asked = PromptAsked(generation.request_id, length, generation.tenant)
        timeout_seconds = (
            math.inf if self._must_fetch else max(LEAST_FIND_SECONDS, self._seconds_to_compute(length))
        )
        prefix.found = await self._stores.find(prefix.names, asked, timeout_seconds=timeout_seconds)

    async def plan(self, prefix: Prefix, num_here: int) -> FetchPlan:
        """How much to fetch behind the blocks that are here. Asks again where the answer is too old."""
        if prefix.found.lease_seconds and prefix.found.is_stale(time.monotonic()):
            await self.find(prefix)
        found, length = prefix.found, num_tokens(prefix.generation)
        plan = plan_fetch(
            num_tokens=length,
            num_here_blocks=num_here,
            num_held_blocks=found.num_held,
            block_size=self._settings.block_size,
            block_bytes=self._stores.block_bytes,
            num_layers=self._stores.num_layers,
            prefill=self._engine.prefill_cost(),
            fetch=self._stores.fetch_cost,
            num_sharing=self._stores.num_fetching + 1,
            num_memory_blocks=found.num_in_memory,
            max_step_tokens=self._settings.max_num_batched_tokens,
        )
        wanted = range(num_here, max(num_here, min(found.num_held, prefix.num_findable)))
        if len(wanted) > plan.num_blocks and (self._must_fetch or self._is_hidden(found, wanted)):
            return replace(plan, num_blocks=len(wanted), reason=FetchReason.FETCH_ALL)
        return plan

    def under_way(self, prefix: Prefix, num_here: int) -> asyncio.Event | None:
        """Set when another prompt will have fetched the next block that this one lacks; None: none does."""
        for claim in self._claims:
            first = max(num_here, claim.blocks.start)
            is_same = first < min(claim.blocks.stop, prefix.num_findable)
            if is_same and claim.names[first] == prefix.names[first]:
                return claim.ended
        return None

    @contextmanager
    def claim(self, prefix: Prefix, num_here: int, plan: FetchPlan) -> Generator[None]:
        """Others need not fetch what this prompt fetches meanwhile."""
        claim = _Claim(prefix.names, range(num_here, num_here + plan.num_blocks))
        self._claims.append(claim)
        try:
            yield
        finally:
            self._claims.remove(claim)
            claim.ended.set()

    def count(self, prefix: Prefix, num_here: int, plan: FetchPlan) -> None:
        """For the metrics: what was decided. A fetch is counted by its end."""
        if plan.num_blocks:
            return
        is_useful = min(prefix.found.num_held, prefix.num_findable) > num_here
        is_failed = bool(prefix.names) and not prefix.found.is_answered
        self._metrics.lookups.labels("recompute" if is_useful else "failed" if is_failed else "none").inc()

    async def fetch(self, prefix: Prefix, num_here: int, plan: FetchPlan) -> FetchResult:
        """Have what is planned written into the blocks of this request. Nothing is written after this."""
        request_id, engine = prefix.generation.request_id, self._engine

        async def write(layer: int, first_block: int, blocks: torch.Tensor) -> bool:
            return await engine.write_blocks(request_id, layer, first_block, blocks)

        recompute_seconds = self._seconds_to_compute(num_tokens(prefix.generation))
        patience_seconds = max(LEAST_FETCH_SECONDS, PATIENCE * plan.seconds, recompute_seconds)
        result = await self._stores.fetch(
            prefix.names,
            prefix.found,
            range(num_here, num_here + plan.num_blocks),
            write,
            timeout_seconds=math.inf if self._must_fetch else patience_seconds,
        )
        self._metrics.lookups.labels(result.value).inc()
        return result

    @property
    def _must_fetch(self) -> bool:
        return self._settings.store_fetch_when == "always"

    def _is_hidden(self, found: PrefixLookup, wanted: range) -> bool:
        """Whether these would be here before the engine has done what it has to do before."""
        block_bytes = self._stores.block_bytes
        seconds = fetch_seconds(
            self._stores.fetch_cost,
            len(wanted) * block_bytes,
            num_sharing=self._stores.num_fetching + 1,
            num_disk_bytes=found.num_on_disk(wanted) * block_bytes,
        )
        return seconds <= self._engine.load().queued_seconds

    def _seconds_to_compute(self, length: int) -> float:
        step = self._settings.max_num_batched_tokens
        return prefill_seconds(self._engine.prefill_cost(), length, 0, max_step_tokens=step)
