"""A prompt's way through the engine: wait for room, see what the stores hold, begin, fetch meanwhile."""

import asyncio

from libs.cost.plan_fetch import FetchPlan
from libs.engine.engine import Engine
from libs.engine.outputs import Reservation
from libs.worker.stores.prefixes import Prefix, Prefixes
from libs.worker.stores.puts import Puts
from libs.worker.stores.store_link import FetchResult
from services.prefill_worker.prompts import Prompt

MAX_WAITS = 3
"""For fetches of other prompts that begin alike."""


class Computing:
    """All prompts of a worker, in order of arrival as far as they wait for room."""

    def __init__(self, engine: Engine, prefixes: Prefixes, puts: Puts, *, block_size: int) -> None:
        self._engine, self._prefixes, self._puts = engine, prefixes, puts
        self._block_size = block_size
        self._door = asyncio.Lock()
        """Its holder is the first in line for blocks; waiters follow in order."""
        self._num_in_line = 0
        self._room_came = asyncio.Event()

    def room_came(self) -> None:
        """Some prompt gave its blocks back."""
        self._room_came.set()

    async def run(self, prompt: Prompt) -> None:
        """Have the engine run it, with KV from the stores as far as that is faster."""
        num_here, plan = await self._reserve_and_plan(prompt)
        if prompt.prefix is None or plan is None or not plan.num_blocks:
            await self._begin(prompt, num_here)
        elif not await self._fetch(prompt, prompt.prefix, num_here, plan):
            await self._start_over(prompt)

    async def _reserve_and_plan(self, prompt: Prompt) -> tuple[int, FetchPlan | None]:
        """How many of its blocks are here and reserved, and what to fetch behind them."""
        num_here = (await self._reserve(prompt)).num_cached_blocks
        plan = await self._plan(prompt, num_here)
        for _ in range(MAX_WAITS):
            if prompt.prefix is None or plan is None or not plan.num_blocks:
                break
            others = self._prefixes.under_way(prompt.prefix, num_here)
            if others is None:
                break
            # Another prompt fetches the same blocks. Once it has them they are found here.
            self._give_back(prompt)
            await others.wait()
            num_here = (await self._reserve(prompt)).num_cached_blocks
            plan = await self._plan(prompt, num_here)
        if prompt.prefix is not None and plan is not None:
            self._prefixes.count(prompt.prefix, num_here, plan)
            self._begin_put(prompt, prompt.prefix)
        return num_here, plan

    async def _start_over(self, prompt: Prompt) -> None:
        """Some of its KV will not come: compute from what is here.

        What was handed out until now is right, for only verified KV was computed with; the same blocks come
        again and take its place, in order, on the same Link.
        """
        self._give_back(prompt)
        if prompt.outlet is not None:
            prompt.outlet.forget(prompt)
        if prompt.put is not None:
            prompt.put.restart()
        reservation = await self._reserve(prompt)
        await self._begin(prompt, reservation.num_cached_blocks)

    async def _begin(self, prompt: Prompt, num_blocks: int, *, awaits_kv: bool = False) -> None:
        prompt.is_begun = True
        await self._engine.begin(
            prompt.request_id,
            num_computed_tokens=num_blocks * self._block_size,
            hand_over=True,
            first_block=prompt.first_block,
            awaits_kv=awaits_kv,
        )

    async def _reserve(self, prompt: Prompt) -> Reservation:
        """Blocks for the whole prompt, in order of arrival."""
        prompt.is_begun = False
        if not self._num_in_line:
            # The engine answers between its steps. If each prompt awaited the one before it, every step would
            # have one of them.
            reservation = await self._ask_for_blocks(prompt)
            if reservation is not None:
                return reservation
        self._num_in_line += 1
        try:
            async with self._door:
                while True:
                    self._room_came.clear()
                    reservation = await self._ask_for_blocks(prompt)
                    if reservation is not None:
                        return reservation
                    await self._room_came.wait()
        finally:
            self._num_in_line -= 1

    async def _ask_for_blocks(self, prompt: Prompt) -> Reservation | None:
        return await self._engine.reserve(
            prompt.request.generation, sequence_id=prompt.request_id, whole_prompt=True
        )

    def _give_back(self, prompt: Prompt) -> None:
        """Its blocks are free, also for whoever waits in front of it."""
        self._engine.abort(prompt.request_id)
        self.room_came()

    async def _plan(self, prompt: Prompt, num_here: int) -> FetchPlan | None:
        """How much to fetch; None where nothing can be gained by waiting for an answer."""
        prefix, finding = prompt.prefix, prompt.finding
        if prefix is None or finding is None or (num_here >= prefix.num_findable and not finding.done()):
            return None
        await finding
        return await self._prefixes.plan(prefix, num_here)

    def _begin_put(self, prompt: Prompt, prefix: Prefix) -> None:
        prompt.put = self._puts.begin(prefix.names, prefix.found, prompt.request_id)
        if prompt.put is not None:
            # Stores want blocks that the decode instance has; they come this way or not at all.
            prompt.first_block = min(prompt.first_block, prompt.put.blocks.start)

    async def _fetch(self, prompt: Prompt, prefix: Prefix, num_here: int, plan: FetchPlan) -> bool:
        """Begin it and fetch, both at once: a busy engine takes KV before it begins. Returns whether it has,
        or will make, all that it was promised. Ends early with the prompt."""
        with self._prefixes.claim(prefix, num_here, plan):
            fetching = asyncio.ensure_future(self._prefixes.fetch(prefix, num_here, plan))
            try:
                await self._begin(prompt, num_here + plan.num_blocks, awaits_kv=True)
                await asyncio.wait((fetching, prompt.handed_over), return_when=asyncio.FIRST_COMPLETED)
                if prompt.handed_over.done() or prompt.is_computed:
                    return True
                return fetching.result() in (FetchResult.HIT, FetchResult.UNWANTED)
            finally:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
