"""Prompts that run on this worker itself, where it has both roles: with KV from the stores, as far as that is
faster than to compute it."""

import structlog

from libs.engine.engine import Engine
from libs.engine.errors import EngineError, UnknownSequence
from libs.request.outcome import FailureReason
from libs.worker.stores.prefixes import Prefixes
from libs.worker.stores.store_link import FetchResult
from services.decode_worker.decoding import Decoding
from services.decode_worker.sequences import HeldSequence

log = structlog.get_logger()


class OwnPrompts:
    """Begins what was reserved."""

    def __init__(self, decoding: Decoding, engine: Engine, prefixes: Prefixes, *, block_size: int) -> None:
        self._decoding, self._engine, self._prefixes = decoding, engine, prefixes
        self._block_size = block_size

    async def run(self, held: HeldSequence, num_here: int) -> None:
        """Returns when nothing of its KV is on its way any more. The engine tells the rest."""
        try:
            await self._begin(held, num_here)
        except UnknownSequence:
            log.debug("sequence_ended_before_its_prompt_ran", request_id=held.request_id)
        except EngineError as error:
            self._decoding.fail(held, FailureReason.INTERNAL, str(error))

    async def _begin(self, held: HeldSequence, num_here: int) -> None:
        prefix = self._prefixes.of(held.generation)
        if num_here >= prefix.num_findable:
            await self._begin_with(held, num_here)
            return
        await self._prefixes.find(prefix)
        plan = await self._prefixes.plan(prefix, num_here)
        self._prefixes.count(prefix, num_here, plan)
        await self._begin_with(held, num_here + plan.num_blocks, awaits_kv=plan.num_blocks > 0)
        if plan.num_blocks:
            result = await self._prefixes.fetch(prefix, num_here, plan)
            is_served = result in (FetchResult.HIT, FetchResult.UNWANTED) or held.output_ids
            if not is_served and self._decoding.sequences.get(held.request_id) is held:
                await self._start_over(held)

    async def _start_over(self, held: HeldSequence) -> None:
        """Some of its KV will not come: compute from what is here."""
        self._engine.abort(held.request_id)
        reservation = await self._engine.reserve(held.generation, whole_prompt=True)
        if self._decoding.sequences.get(held.request_id) is not held:
            self._engine.abort(held.request_id)
        elif reservation is None:
            self._decoding.fail(held, FailureReason.PEER_LOST, "its KV did not come and its room is gone")
        else:
            await self._begin_with(held, reservation.num_cached_blocks)

    async def _begin_with(self, held: HeldSequence, num_blocks: int, *, awaits_kv: bool = False) -> None:
        await self._engine.begin(
            held.request_id, num_computed_tokens=num_blocks * self._block_size, awaits_kv=awaits_kv
        )
