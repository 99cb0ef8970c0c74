"""Runs prompts: waits for room, sees what the KV stores hold, begins, and fetches meanwhile."""

import asyncio

from libs.cost.plan_fetch import FetchPlan
from libs.engine.engine import Engine
from libs.engine.outputs import Reservation
from libs.runtime.runtime import Spawn
from libs.worker.prefill.block_queue import BlockQueue
from libs.worker.prefill.prompt import Prompt
from libs.worker.prefill.waiting_work import WaitingWork
from libs.worker.stores.kv_uploads import KvUploads
from libs.worker.stores.prefixes import Prefix, Prefixes
from libs.worker.stores.store_link import FetchResult

MAX_WAITS = 3
"""For fetches of other prompts that begin alike."""


class PromptRuns:
    """All prompts that run on this worker, from `add` to `remove`."""

    def __init__(
        self,
        engine: Engine,
        blocks: BlockQueue,
        prefixes: Prefixes,
        uploads: KvUploads,
        spawn: Spawn,
        *,
        block_size: int,
    ) -> None:
        self._engine, self._blocks, self._prefixes, self._uploads = engine, blocks, prefixes, uploads
        self._spawn, self._block_size = spawn, block_size
        self._prompts: dict[Prompt, None] = {}

    def add(self, prompt: Prompt) -> None:
        """Ask the stores for its prefix while it waits for room: they bring it into memory meanwhile."""
        self._prompts[prompt] = None
        prefix = self._prefixes.of(prompt.generation)
        if prefix.names:
            prompt.prefix = prefix
            prompt.finding = self._spawn("find-prefix", self._prefixes.find(prefix))

    def remove(self, prompt: Prompt) -> None:
        """However it ended, nothing of it stays but its sequence in the engine."""
        prompt.is_over = True
        self._prompts.pop(prompt, None)
        if prompt.finding is not None:
            prompt.finding.cancel()
        if prompt.upload is not None:
            self._uploads.end(prompt.upload)
            prompt.upload = None

    def waiting_work(self) -> WaitingWork:
        """Of prompts that the engine does not know of yet."""
        return WaitingWork((prompt for prompt in self._prompts if not prompt.is_begun), self._block_size)

    async def run(self, prompt: Prompt, reservation: Reservation | None = None) -> None:
        """Have the engine run it, with KV from the stores as far as that is faster. `reservation` where its
        blocks are held already. Raises EngineError."""
        num_here, plan = await self._reserve_and_plan(prompt, reservation)
        if prompt.prefix is None or plan is None or not plan.num_blocks:
            await self._begin(prompt, num_here)
        elif not await self._fetch(prompt, prompt.prefix, num_here, plan):
            await self._start_over(prompt)

    async def _reserve_and_plan(
        self, prompt: Prompt, reservation: Reservation | None
    ) -> tuple[int, FetchPlan | None]:
        """How many of its blocks are here and reserved, and what to fetch behind them."""
        reservation = reservation or await self._reserve(prompt)
        num_here = reservation.num_cached_blocks
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
            if prompt.hands_over:
                self._begin_upload(prompt, prompt.prefix)
        return num_here, plan

    async def _start_over(self, prompt: Prompt) -> None:
        """Some of its KV will not come: compute from what is here.

        What was handed out until now is right, for only verified KV was computed with; the same blocks come
        again and take its place, in order, on the same Link.
        """
        self._give_back(prompt)
        prompt.restart()
        reservation = await self._reserve(prompt)
        await self._begin(prompt, reservation.num_cached_blocks)

    async def _begin(self, prompt: Prompt, num_blocks: int, *, awaits_kv: bool = False) -> None:
        prompt.is_begun = True
        await self._engine.begin(
            prompt.request_id,
            num_computed_tokens=num_blocks * self._block_size,
            hand_over=prompt.hands_over,
            first_block=prompt.first_block,
            awaits_kv=awaits_kv,
        )

    async def _reserve(self, prompt: Prompt) -> Reservation:
        prompt.is_begun = False
        return await self._blocks.reserve(prompt.generation)

    def _give_back(self, prompt: Prompt) -> None:
        """Its blocks are free, also for what waits in front of it."""
        self._engine.abort(prompt.request_id)
        self._blocks.freed()

    async def _plan(self, prompt: Prompt, num_here: int) -> FetchPlan | None:
        """How much to fetch; None where nothing can be gained by waiting for an answer."""
        prefix, finding = prompt.prefix, prompt.finding
        if prefix is None or finding is None or (num_here >= prefix.num_findable and not finding.done()):
            return None
        await finding
        return await self._prefixes.plan(prefix, num_here)

    def _begin_upload(self, prompt: Prompt, prefix: Prefix) -> None:
        prompt.upload = self._uploads.begin(prefix.names, prefix.found, prompt.request_id)
        if prompt.upload is not None:
            # Stores want blocks that the decode instance has; they come this way or not at all.
            prompt.first_block = min(prompt.first_block, prompt.upload.blocks.start)

    async def _fetch(self, prompt: Prompt, prefix: Prefix, num_here: int, plan: FetchPlan) -> bool:
        """Begin it and fetch, both at once: a busy engine takes KV before it begins. Returns whether it has,
        or will make, all that it was promised. Ends early with the prompt."""
        with self._prefixes.claim(prefix, num_here, plan):
            fetching = asyncio.ensure_future(self._prefixes.fetch(prefix, num_here, plan))
            try:
                await self._begin(prompt, num_here + plan.num_blocks, awaits_kv=True)
                await asyncio.wait((fetching, prompt.done), return_when=asyncio.FIRST_COMPLETED)
                if prompt.done.done() or prompt.is_computed:
                    return True
                return fetching.result() in (FetchResult.HIT, FetchResult.UNWANTED)
            finally:
                fetching.cancel()
                await asyncio.gather(fetching, return_exceptions=True)
