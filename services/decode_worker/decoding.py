"""What a decode worker does with its sequences: hold, adopt, generate, end."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from libs.bus.messages.generation import Refused, Reserve, Reserved, TokenDelta
from libs.engine.engine import Engine
from libs.engine.errors import EngineError, PromptTooLong
from libs.engine.outputs import LayerOutput, Reservation, SequenceFailed, TokenOutput
from libs.request.generation import num_tokens
from libs.request.outcome import FailureReason, RefusalReason
from libs.telemetry.traces import end_span, start_span
from libs.transport.frames import HandOver
from libs.worker.answer_lengths import AnswerLengths
from libs.worker.recent_requests import RecentRequests
from services.decode_worker.adoption import Adoption
from services.decode_worker.metrics import DecodeMetrics
from services.decode_worker.sequences import HeldSequence, Sequences, Stage

log = structlog.get_logger()

SendTokens = Callable[[str, Sequence[TokenDelta]], None]
"""Gateway, and what one step has for it."""
TellNames = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Names of blocks that can be found here now, and of such that cannot any more."""
RunPrompt = Callable[[HeldSequence, int], object]
"""A reserved sequence, and the blocks of its prompt that are here: run the prompt in the background."""


class Decoding:
    """All sequences of this worker. It is the engine's listener; everything runs on the event loop."""

    def __init__(
        self,
        sequences: Sequences,
        metrics: DecodeMetrics,
        send_tokens: SendTokens,
        *,
        block_size: int,
        num_layers: int,
        max_held: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.sequences, self._metrics, self._send_tokens = sequences, metrics, send_tokens
        self._block_size, self._num_layers = block_size, num_layers
        self._max_held, self._clock = max_held, clock
        self.recent = RecentRequests()
        self.recently_ended = RecentRequests()
        """Their gateways were told, or will be at once."""
        self._aborted_unknown = RecentRequests()
        """An abort can overtake the reservation that it is about: they come on two subscriptions."""
        self.answer_lengths = AnswerLengths()
        self.num_links = Counter[str]()
        """Links of each prefill worker that are served: what came over them may still be on its way in."""
        self.is_draining = False
        self.came = asyncio.Event()
        """Set when a sequence got a lease or lost it: the next expiry may be another."""
        self.ended = asyncio.Event()
        """Set when a sequence is over."""
        self._engine: Engine | None = None
        self._on_names: TellNames = _tell_nobody
        self._on_finished: Callable[[HeldSequence], None] | None = None
        self._run_prompt: RunPrompt | None = None

    def attach(
        self,
        engine: Engine,
        *,
        on_names: TellNames,
        on_finished: Callable[[HeldSequence], None] | None,
        run_prompt: RunPrompt,
    ) -> None:
        """The engine whose listener this is; who hears of blocks by name, and of sequences that came to
        their own end; and who runs prompts here."""
        self._engine, self._on_names, self._on_finished = engine, on_names, on_finished
        self._run_prompt = run_prompt

    @property
    def engine(self) -> Engine:
        """Attached before anything is served."""
        if self._engine is None:
            raise RuntimeError("the engine is attached before the first request")
        return self._engine

    # What gateways ask

    async def reserve(self, request: Reserve, link_address: str) -> Reserved | Refused:
        """Hold blocks for a sequence; where nobody prefills for it, begin it."""
        refusal = self._refusal(request)
        if refusal is None and self.sequences.get(request.generation.request_id) is None:
            refusal = await self._take_in(request)
        if refusal is not None:
            self._metrics.refused.labels(refusal.reason.value).inc()
            return refusal
        held = self.sequences.get(request.generation.request_id)
        num_cached = held.adoption.num_cached_blocks if held is not None and held.adoption is not None else 0
        return Reserved(link_address=link_address if request.prefill else "", num_cached_blocks=num_cached)

    def abort(self, request_id: str) -> None:
        """Nobody wants it any more, nor when it comes only now."""
        held = self._end(request_id, "aborted")
        if held is not None:
            self.engine.abort(request_id)
        else:
            self._aborted_unknown.add(request_id, self._clock())

    def gateway_gone(self, gateway: str) -> None:
        """Nobody reads the tokens of these any more."""
        for held in self.sequences.of_gateway(gateway):
            self.abort(held.request_id)

    # What prefill workers bring

    async def adopt(self, held: HeldSequence, hand_over: HandOver) -> None:
        """All KV was sent. Join the batch if all of it is here."""
        adoption = held.adoption
        if adoption is None or not adoption.is_complete:
            missing = adoption.num_missing if adoption else 0
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
            self._metrics.adopt_seconds.observe(max(0.0, self._clock() - held.first_blocks_at))
        self.on_tokens((first,))
        try:
            await self.engine.start_decode(held.request_id, first)
        except EngineError as error:
            if self.sequences.get(held.request_id) is held:
                self.fail(held, FailureReason.INTERNAL, str(error))

    def peer_lost(self, prefill: str, detail: str) -> None:
        """Its KV will not come: fail what waits for it at once, so that it is replayed elsewhere."""
        for held in self.sequences.awaiting(prefill):
            self.fail(held, FailureReason.PEER_LOST, detail)

    def peer_left(self, prefill: str, detail: str, *, is_drained: bool) -> None:
        """It is not in the mesh any more. What one that ended in good order has sent is adopted; what still
        waits then fails when its Link ends."""
        if not (is_drained and self.num_links[prefill]):
            self.peer_lost(prefill, detail)

    def expire(self) -> None:
        """Free what nobody came for."""
        for held, reason in self.sequences.expired(self._clock()):
            self.fail(held, reason, f"ended here while it was {held.stage.name.lower()}")

    def renew(self, held: HeldSequence) -> None:
        """Its prefill worker was heard."""
        self.sequences.renew(held, self._clock())

    def fail(self, held: HeldSequence, reason: FailureReason, detail: str) -> None:
        """End it, free it, tell its gateway. Nothing happens for one that is over."""
        if self.sequences.get(held.request_id) is held:
            self.engine.abort(held.request_id)
            self._failed(held, reason, detail)

    # What the engine tells

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        """See EngineListener: one frame per gateway."""
        by_gateway: dict[str, list[TokenDelta]] = {}
        for token in tokens:
            held = self.sequences.get(token.sequence_id)
            if held is None:
                continue
            by_gateway.setdefault(held.generation.gateway, []).append(_delta_of(token))
            if not held.prefill and token.index == held.first_index:
                self._metrics.cache_queries.inc(num_tokens(held.generation))
                self._metrics.cache_hits.inc(token.num_cached_tokens)
            held.output_ids.append(token.token_id)
            if token.finish is not None:
                self.answer_lengths.add(len(held.output_ids))
                self._end(token.sequence_id, token.finish.value)
                self.recently_ended.add(token.sequence_id, self._clock())
                if self._on_finished is not None:
                    self._on_finished(held)
        for gateway, deltas in by_gateway.items():
            self._metrics.generation_tokens.inc(len(deltas))
            self._send_tokens(gateway, deltas)

    def on_layer(self, output: LayerOutput) -> None:
        """See EngineListener. Nothing is begun with hand-over here."""

    def on_prompt_done(self, output: TokenOutput) -> None:
        """See EngineListener. Nothing is begun with hand-over here."""

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See EngineListener."""
        self._on_names(stored, removed)

    def on_failed(self, failure: SequenceFailed) -> None:
        """See EngineListener."""
        held = self.sequences.get(failure.sequence_id)
        if held is not None:
            self._failed(held, failure.reason, failure.detail)

    # Parts

    def _refusal(self, request: Reserve) -> Refused | None:
        if self.is_draining:
            return Refused(reason=RefusalReason.DRAINING, detail="this worker is shutting down")
        if request.generation.deadline_unix_seconds <= self._clock():
            return Refused(reason=RefusalReason.DEADLINE, detail="its deadline passed on the way here")
        if request.generation.request_id in self._aborted_unknown.ids(self._clock()):
            return Refused(reason=RefusalReason.OVERLOADED, detail="it was aborted before it came")
        known = self.sequences.get(request.generation.request_id)
        if known is not None and known.stage is Stage.RESERVING:
            return Refused(reason=RefusalReason.OVERLOADED, detail="it is being reserved already")
        if known is None and len(self.sequences) >= self._max_held:
            return Refused(
                reason=RefusalReason.OVERLOADED, detail=f"{self._max_held} sequences are held here"
            )
        return None

    async def _take_in(self, request: Reserve) -> Refused | None:
        generation = request.generation
        span = start_span("decode", generation.traceparent, request_id=generation.request_id)
        held = self.sequences.hold(generation, request.prefill, span, self._clock())
        try:
            reservation = await self.engine.reserve(
                generation, sequence_id=generation.request_id, whole_prompt=True
            )
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
            self.engine.abort(held.request_id)
            return Refused(reason=RefusalReason.OVERLOADED, detail="it was aborted meanwhile")
        self._metrics.prompt_tokens.inc(generation.num_prompt_tokens)
        self.recent.add(held.request_id, self._clock())
        self._start(held, reservation)
        return None

    def _start(self, held: HeldSequence, reservation: Reservation) -> None:
        num_cached = reservation.num_cached_blocks
        if held.prefill:
            num_blocks = -(-num_tokens(held.generation) // self._block_size)
            held.adoption = Adoption(self._num_layers, num_blocks, num_cached)
            held.stage = Stage.AWAITING_KV
            self.came.set()
            return
        held.stage = Stage.RUNNING
        self.came.set()
        if self._run_prompt is not None:
            self._run_prompt(held, num_cached)

    def _failed(self, held: HeldSequence, reason: FailureReason, detail: str) -> None:
        self._end(held.request_id, reason.value)
        self.recently_ended.add(held.request_id, self._clock())
        self._metrics.failed.labels(reason.value).inc()
        log.info("sequence_failed", request_id=held.request_id, reason=reason.value, detail=detail)
        delta = TokenDelta(
            request_id=held.request_id, index=held.first_index, token_ids=(), failure=reason, detail=detail
        )
        self._send_tokens(held.generation.gateway, (delta,))

    def _end(self, request_id: str, outcome: str) -> HeldSequence | None:
        held = self.sequences.remove(request_id)
        if held is not None:
            held.span.set_attribute("outcome", outcome)
            end_span(held.span)
            self.ended.set()
        return held


def _tell_nobody(stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
    """Until somebody wants to know."""


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
