"""Sequences that generate here: reserved, received or run, streamed, ended."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from libs.bus.messages.generation import Refused, Reserve, Reserved, TokenDelta
from libs.engine.engine import Engine
from libs.engine.errors import EngineError, PromptTooLong, UnknownSequence
from libs.engine.outputs import Reservation, SequenceFailed, TokenOutput
from libs.request.generation import num_tokens
from libs.request.outcome import FailureReason, RefusalReason
from libs.runtime.runtime import Spawn
from libs.telemetry.traces import end_span, start_span
from libs.transport.frames import HandOver
from libs.worker.admission import Admission
from libs.worker.decode.answer_lengths import AnswerLengths
from libs.worker.decode.finished_kv import FinishedKvUploads
from libs.worker.decode.received_blocks import ReceivedBlocks
from libs.worker.decode.sequences import HeldSequence, Sequences, Stage
from libs.worker.metrics import WorkerMetrics
from libs.worker.prefill.block_queue import BlockQueue
from libs.worker.prefill.prompt import Prompt
from libs.worker.prefill.prompt_runs import PromptRuns
from libs.worker.settings import WorkerSettings
from libs.worker.token_sender import SendTokens

log = structlog.get_logger()


class DecodeRequests:
    """All sequences that generate on this worker; everything runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        runs: PromptRuns,
        blocks: BlockQueue,
        uploads: FinishedKvUploads,
        admission: Admission,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
        spawn: Spawn,
        send_tokens: SendTokens,
        *,
        num_layers: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._runs, self._blocks, self._uploads = engine, runs, blocks, uploads
        self._admission, self._metrics, self._settings = admission, metrics, settings
        self._spawn, self._send_tokens, self._clock = spawn, send_tokens, clock
        self._num_layers = num_layers
        self.sequences = Sequences(settings.lease_seconds)
        self.answer_lengths = AnswerLengths()
        self.num_links = Counter[str]()
        """Links of each prefill worker that are served: what came over them may still be on its way in."""
        self._expiry_changed = asyncio.Event()
        """Set when a sequence got a lease or lost it: the next expiry may be another."""
        self._ended = asyncio.Event()
        """Set when a sequence is over."""

    async def wait_empty(self) -> None:
        """Returns when none is here."""
        while len(self.sequences):
            self._ended.clear()
            await self._ended.wait()

    # What gateways ask

    async def reserve(self, request: Reserve, link_address: str) -> Reserved | Refused:
        """Hold blocks for a sequence; where nobody prefills for it, run its prompt."""
        refusal = self._refusal(request)
        if refusal is None and self.sequences.get(request.generation.request_id) is None:
            refusal = await self._take(request)
        if refusal is not None:
            self._metrics.refused.labels(refusal.reason.value).inc()
            return refusal
        held = self.sequences.get(request.generation.request_id)
        received = held.received if held is not None else None
        num_cached = received.num_cached_blocks if received is not None else 0
        return Reserved(link_address=link_address if request.prefill else "", num_cached_blocks=num_cached)

    def abort(self, request_id: str) -> bool:
        """Nobody wants it any more. False where it is not here."""
        held = self._end(request_id, "aborted")
        if held is not None:
            self._engine.abort(request_id)
        return held is not None

    def gateway_gone(self, gateway: str) -> None:
        """Nobody reads the tokens of these any more."""
        for held in self.sequences.of_gateway(gateway):
            self.abort(held.request_id)

    # What prefill workers bring

    async def start_decode(self, held: HeldSequence, hand_over: HandOver) -> None:
        """All KV was sent. Join the batch if all of it is here."""
        received = held.received
        if received is None or not received.is_complete:
            missing = received.num_missing if received else 0
            self.fail(held, FailureReason.CORRUPT, f"{missing} blocks of its KV never arrived")
            return
        first = TokenOutput(
            sequence_id=held.request_id,
            index=held.first_index,
            token_id=hand_over.token_id,
            logprobs=hand_over.logprobs,
            finish=hand_over.finish,
            num_cached_tokens=hand_over.num_cached_tokens,
            prefill_started_unix_seconds=hand_over.prefill_started_unix_seconds,
        )
        held.stage = Stage.RUNNING
        if held.first_blocks_at is not None:
            seconds = max(0.0, self._clock() - held.first_blocks_at)
            self._metrics.transfer_seconds.labels("received").observe(seconds)
        self.on_tokens((first,))
        try:
            await self._engine.start_decode(held.request_id, first)
        except EngineError as error:
            if self.sequences.get(held.request_id) is held:
                self.fail(held, FailureReason.INTERNAL, str(error))

    def peer_lost(self, prefill: str, detail: str) -> None:
        """Its KV will not come: fail what waits for it at once, so that it is replayed elsewhere."""
        for held in self.sequences.awaiting(prefill):
            self.fail(held, FailureReason.PEER_LOST, detail)

    def peer_left(self, prefill: str, detail: str, *, is_drained: bool) -> None:
        """It is not in the mesh any more. Of one that ended in good order, what it has sent is still taken
        in; what still waits then fails when its Link ends."""
        if not (is_drained and self.num_links[prefill]):
            self.peer_lost(prefill, detail)

    def renew(self, held: HeldSequence) -> None:
        """Its prefill worker was heard."""
        self.sequences.renew(held, self._clock())

    def fail(self, held: HeldSequence, reason: FailureReason, detail: str) -> None:
        """End it, free it, tell its gateway. Nothing happens for one that is over."""
        if self.sequences.get(held.request_id) is held:
            self._engine.abort(held.request_id)
            self._failed(held, reason, detail)

    # Time

    async def wait_expiry(self) -> None:
        """Returns when a lease or a deadline may have passed."""
        self._expiry_changed.clear()
        wake_at = self.sequences.next_expiry()
        seconds = None if wake_at == float("inf") else max(0.0, wake_at - self._clock())
        try:
            async with asyncio.timeout(seconds):
                await self._expiry_changed.wait()
        except TimeoutError:
            pass

    def expire(self) -> None:
        """Free what nobody came for."""
        for held, reason in self.sequences.expired(self._clock()):
            self.fail(held, reason, f"ended here while it was {held.stage.name.lower()}")

    # What the engine makes

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        """See EngineListener: one frame per gateway."""
        by_gateway: dict[str, list[TokenDelta]] = {}
        for token in tokens:
            held = self.sequences.get(token.sequence_id)
            if held is None:
                continue
            by_gateway.setdefault(held.generation.gateway, []).append(_delta_of(token))
            if held.prompt is not None and token.index == held.first_index:
                self._prompt_done(held.prompt, token)
            held.output_ids.append(token.token_id)
            if token.finish is not None:
                self.answer_lengths.add(len(held.output_ids))
                self._end(token.sequence_id, token.finish.value)
                self._admission.ended(token.sequence_id)
                if self._settings.store_finished:
                    self._uploads.finished(held)
        for gateway, deltas in by_gateway.items():
            self._metrics.generation_tokens.inc(len(deltas))
            self._send_tokens(gateway, deltas)

    def on_failed(self, failure: SequenceFailed) -> None:
        """See EngineListener."""
        held = self.sequences.get(failure.sequence_id)
        if held is not None:
            self._failed(held, failure.reason, failure.detail)

    # Parts

    def _refusal(self, request: Reserve) -> Refused | None:
        if (refusal := self._admission.refusal(request.generation)) is not None:
            return refusal
        known, max_held = self.sequences.get(request.generation.request_id), self._settings.max_held
        if known is not None and known.stage is Stage.RESERVING:
            return Refused(reason=RefusalReason.OVERLOADED, detail="it is being reserved already")
        if known is None and len(self.sequences) >= max_held:
            return Refused(reason=RefusalReason.OVERLOADED, detail=f"{max_held} sequences are held here")
        return None

    async def _take(self, request: Reserve) -> Refused | None:
        generation = request.generation
        span = start_span("decode", generation.traceparent, request_id=generation.request_id)
        held = self.sequences.hold(generation, request.prefill, span, self._clock())
        try:
            reservation = await self._blocks.reserve_now(generation)
        except PromptTooLong as error:
            self._end(held.request_id, "refused")
            return Refused(reason=RefusalReason.TOO_LONG, detail=str(error))
        except BaseException:
            # Cancelled while the engine was deciding, or refused for good: nothing may stay behind.
            self.abort(held.request_id)
            raise
        if reservation is None:
            self._end(held.request_id, "refused")
            return Refused(reason=RefusalReason.OVERLOADED, detail="no KV blocks are free")
        if self.sequences.get(held.request_id) is not held:
            self._engine.abort(held.request_id)
            return Refused(reason=RefusalReason.OVERLOADED, detail="it was aborted meanwhile")
        self._metrics.prompt_tokens.inc(generation.num_prompt_tokens)
        self._admission.taken(held.request_id)
        self._start(held, reservation)
        return None

    def _start(self, held: HeldSequence, reservation: Reservation) -> None:
        if held.prefill:
            num_blocks = -(-num_tokens(held.generation) // self._settings.block_size)
            held.received = ReceivedBlocks(self._num_layers, num_blocks, reservation.num_cached_blocks)
            held.stage = Stage.AWAITING_KV
        else:
            held.stage = Stage.RUNNING
            held.prompt = prompt = Prompt(generation=held.generation)
            self._runs.add(prompt)
            held.running = self._spawn("prompt", self._run(held, prompt, reservation))
            held.running.add_done_callback(lambda _: self._runs.remove(prompt))
        self._expiry_changed.set()

    async def _run(self, held: HeldSequence, prompt: Prompt, reservation: Reservation) -> None:
        """Returns when nothing of its KV is on its way any more. The engine tells the rest."""
        try:
            await self._runs.run(prompt, reservation)
        except UnknownSequence:
            log.debug("sequence_ended_before_its_prompt_ran", request_id=held.request_id)
        except EngineError as error:
            self.fail(held, FailureReason.INTERNAL, str(error))

    def _prompt_done(self, prompt: Prompt, first: TokenOutput) -> None:
        prompt.is_computed = True
        prompt.finish()
        self._metrics.cache_queries.inc(prompt.num_tokens)
        self._metrics.cache_hits.inc(first.num_cached_tokens)

    def _failed(self, held: HeldSequence, reason: FailureReason, detail: str) -> None:
        self._end(held.request_id, reason.value)
        self._admission.ended(held.request_id)
        self._metrics.failed.labels(reason.value).inc()
        log.info("sequence_failed", request_id=held.request_id, reason=reason.value, detail=detail)
        delta = TokenDelta(
            request_id=held.request_id, index=held.first_index, token_ids=(), failure=reason, detail=detail
        )
        self._send_tokens(held.generation.gateway, (delta,))

    def _end(self, request_id: str, outcome: str) -> HeldSequence | None:
        held = self.sequences.remove(request_id)
        if held is not None:
            if held.running is not None:
                held.running.cancel()
            held.span.set_attribute("outcome", outcome)
            end_span(held.span)
            self._ended.set()
            self._blocks.freed()
        return held


def _delta_of(token: TokenOutput) -> TokenDelta:
    return TokenDelta(
        request_id=token.sequence_id,
        index=token.index,
        token_ids=(token.token_id,),
        logprobs=() if token.logprobs is None else (token.logprobs,),
        finish=token.finish,
        num_cached_tokens=token.num_cached_tokens,
        prefill_started_unix_seconds=token.prefill_started_unix_seconds,
    )
