"""The prefix of a prompt as the stores have it: sought when the prompt arrives, fetched where that is faster
than to compute it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from blake3 import blake3

from libs.cost.plan_fetch import FetchPlan, plan_fetch
from libs.cost.prefill import PrefillCost, prefill_seconds
from libs.engine.engine import Engine
from libs.kv.names import block_names
from libs.request.generation import Generation, num_tokens
from libs.worker.stores.found import Found
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.settings import StoreSettings
from libs.worker.stores.store_link import FetchResult
from libs.worker.stores.stores import PromptAsked, Stores

LEAST_FIND_SECONDS = 0.02
"""A prompt waits for the stores' answers no longer than it would take to compute; but so long always."""
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
    found: Found = field(default_factory=Found)


class Prefixes:
    """For one engine. `prefill_cost` is what it has measured."""

    def __init__(
        self,
        stores: Stores,
        metrics: StoreMetrics,
        settings: StoreSettings,
        *,
        fingerprint: str,
        prefill_cost: Callable[[], PrefillCost],
    ) -> None:
        self._stores, self._metrics, self._settings = stores, metrics, settings
        self._fingerprint, self._prefill_cost = fingerprint, prefill_cost

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
        asked = PromptAsked(generation.request_id, length, tenant_of(generation.cache_salt))
        timeout_seconds = max(LEAST_FIND_SECONDS, self._seconds_to_compute(length))
        prefix.found = await self._stores.find(prefix.names, asked, timeout_seconds=timeout_seconds)

    async def plan(self, prefix: Prefix, num_here: int) -> FetchPlan:
        """How much to fetch behind the blocks that are here. Asks again where the answer is too old."""
        if prefix.found.lease_seconds and prefix.found.is_stale(time.monotonic()):
            await self.find(prefix)
        found = prefix.found
        plan = plan_fetch(
            num_tokens=num_tokens(prefix.generation),
            num_here_blocks=num_here,
            num_held_blocks=found.num_held,
            block_size=self._settings.block_size,
            block_bytes=self._stores.block_bytes,
            num_layers=self._stores.num_layers,
            prefill=self._prefill_cost(),
            fetch=self._stores.fetch_cost,
            num_sharing=self._stores.num_fetching + 1,
            num_memory_blocks=found.num_in_memory,
            max_step_tokens=self._settings.max_num_batched_tokens,
        )
        num_more = max(0, min(found.num_held, prefix.num_findable) - num_here)
        if num_more == 0:
            failed = prefix.names and not found.is_answered
            self._metrics.lookups.labels("failed" if failed else "none").inc()
        elif self._settings.store_fetch_when == "always":
            return FetchPlan(num_more, plan.seconds, plan.reason)
        elif plan.num_blocks == 0:
            self._metrics.lookups.labels("recompute").inc()
        return plan

    async def fetch(self, prefix: Prefix, num_here: int, plan: FetchPlan, engine: Engine) -> FetchResult:
        """Have what is planned written into the blocks of this request. Nothing is written after this."""
        request_id = prefix.generation.request_id

        async def write(layer: int, first_block: int, blocks: torch.Tensor) -> bool:
            return await engine.write_blocks(request_id, layer, first_block, blocks)

        recompute_seconds = self._seconds_to_compute(num_tokens(prefix.generation))
        fetched = await self._stores.fetch(
            prefix.names,
            prefix.found,
            range(num_here, num_here + plan.num_blocks),
            write,
            timeout_seconds=max(LEAST_FETCH_SECONDS, PATIENCE * plan.seconds, recompute_seconds),
        )
        self._metrics.lookups.labels(fetched.result.value).inc()
        return fetched.result

    def _seconds_to_compute(self, length: int) -> float:
        step = self._settings.max_num_batched_tokens
        return prefill_seconds(self._prefill_cost(), length, 0, max_step_tokens=step)


def tenant_of(cache_salt: str) -> str:
    """A short name for whoever has this salt; nobody learns the salt from it."""
    return blake3(cache_salt.encode()).hexdigest(4) if cache_salt else ""
