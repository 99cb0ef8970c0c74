"""What a prefill worker does with its prompts: wait for room, find a prefix, run, hand over.

How a prompt ends, and who tells its gateway. Handed over: the decode worker sends the first token. Failed
while its Link is there: the decode worker is told, frees its blocks and tells the gateway. Failed without a
Link: a token frame from here, because the decode worker is dead or out of reach. Should both tell, the
first counts.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from libs.bus.messages.generation import Prefill, Queued, Refused, TokenDelta
from libs.engine.engine import Engine
from libs.engine.errors import EngineError
from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput
from libs.request.generation import num_tokens
from libs.request.outcome import FailureReason, RefusalReason
from libs.runtime.runtime import Spawn
from libs.telemetry.traces import end_span, start_span
from libs.transport.frames import HandOverFailed
from libs.transport.port import LinkError
from libs.worker.device_events import DeviceEvents
from libs.worker.recent_requests import RecentRequests
from libs.worker.stores.prefixes import Prefixes
from libs.worker.stores.puts import Puts
from services.prefill_worker.computing import Computing
from services.prefill_worker.metrics import PrefillMetrics
from services.prefill_worker.outlet import Outlet
from services.prefill_worker.outlets import Outlets
from services.prefill_worker.prompts import Prompt, PromptFailed, Prompts

SendTokens = Callable[[str, Sequence[TokenDelta]], None]

HANDED_OVER = "handed_over"

log = structlog.get_logger()


class Prefilling:
    """All prompts of this worker, one task each. It is the engine's listener."""

    def __init__(
        self,
        metrics: PrefillMetrics,
        spawn: Spawn,
        send_tokens: SendTokens,
        *,
        block_size: int,
        max_waiting: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics, self._spawn, self._send_tokens = metrics, spawn, send_tokens
        self._block_size, self._max_waiting, self._clock = block_size, max_waiting, clock
        self.prompts = Prompts()
        self.recent = RecentRequests()
        self._aborted_unknown = RecentRequests()
        """An abort can overtake the prompt that it is about: they come on two subscriptions."""
        self.is_draining = False
        self._max_tokens = 0

    def attach(
        self, engine: Engine, outlets: Outlets, prefixes: Prefixes, puts: Puts, events: DeviceEvents
    ) -> None:
        """What prompts run on; before the first request."""
        self._engine, self._outlets, self._events = engine, outlets, events
        self._prefixes, self._puts = prefixes, puts
        self._computing = Computing(engine, prefixes, puts, block_size=self._block_size)

    def limit_tokens(self, max_tokens: int) -> None:
        """The most that the engine takes, the first new token included; known once it has started."""
        self._max_tokens = max_tokens

    # What gateways ask

    def take(self, request: Prefill) -> Queued | Refused:
        """Queue a prompt. Asked twice, it is queued once."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._metrics.refused.labels(refusal.reason.value).inc()
            return refusal
        generation = request.generation
        if self.prompts.get(generation.request_id) is None:
            span = start_span("prefill", generation.traceparent, request_id=generation.request_id)
            prompt = Prompt(request, self._clock(), span, first_block=self._first_block(request))
            self.prompts.add(prompt)
            self.recent.add(prompt.request_id, self._clock())
            self._seek_prefix(prompt)
            prompt.task = self._spawn("prompt", self._run(prompt))
            # Not in `_run`: a task cancelled before its first step never gets there.
            prompt.task.add_done_callback(lambda _: self._over(prompt))
        return Queued(num_waiting=len(self.prompts))

    def abort(self, request_id: str) -> None:
        """Nobody wants it any more, nor when it comes only now."""
        prompt = self.prompts.get(request_id)
        if prompt is None:
            self._aborted_unknown.add(request_id, self._clock())
        elif prompt.task is not None:
            prompt.task.cancel()

    def gateway_gone(self, gateway: str) -> None:
        """Nobody reads the tokens of these any more."""
        for prompt in self.prompts.of_gateway(gateway):
            self.abort(prompt.request_id)

    def outlet_lost(self, outlet: Outlet, reason: str) -> None:
        """These cannot be handed over there any more; their gateways replay them elsewhere."""
        for prompt in self.prompts.through(outlet):
            prompt.fail(FailureReason.PEER_LOST, f"the Link to its decode worker ended: {reason}")

    # What the engine tells

    def on_layer(self, output: LayerOutput) -> None:
        """See EngineListener: on its way at once, while the next layer is computed."""
        prompt = self.prompts.get(output.sequence_id)
        if prompt is None or prompt.outlet is None or not prompt.outlet.is_open:
            self._engine.release_layer(output)
            return
        if prompt.put is not None:
            prompt.put.collect(output)
        prompt.outlet.put_layer(prompt, output)

    def on_prompt_done(self, output: TokenOutput) -> None:
        """See EngineListener: the first token follows its layers."""
        self._computing.room_came()
        prompt = self.prompts.get(output.sequence_id)
        if prompt is None or prompt.outlet is None:
            return
        started = output.prefill_started_unix_seconds
        prompt.is_computed = True
        self._metrics.prompt_tokens.inc(prompt.num_tokens)
        self._metrics.cache_queries.inc(prompt.num_tokens)
        self._metrics.cache_hits.inc(output.num_cached_tokens)
        self._metrics.queue_seconds.observe(max(0.0, started - prompt.arrived_at))
        self._metrics.prefill_seconds.observe(max(0.0, self._clock() - started))
        prompt.span.set_attribute("num_cached_tokens", output.num_cached_tokens)
        prompt.span.set_attribute("queue_seconds", max(0.0, started - prompt.arrived_at))
        prompt.outlet.put_first_token(prompt, output)

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """See EngineListener."""
        self._events.tell(stored, removed)

    def on_failed(self, failure: SequenceFailed) -> None:
        """See EngineListener."""
        self._computing.room_came()
        prompt = self.prompts.get(failure.sequence_id)
        if prompt is not None:
            prompt.fail(failure.reason, failure.detail)

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        """See EngineListener. Everything here is begun with hand-over, so no tokens come this way."""

    # The way of one prompt

    async def _run(self, prompt: Prompt) -> None:
        try:
            await self._hand_over(prompt)
            prompt.outcome = HANDED_OVER
        except PromptFailed as failure:
            prompt.outcome = failure.reason.value
            self._failed(prompt, failure)

    def _over(self, prompt: Prompt) -> None:
        """However it ended, nothing of it stays."""
        self.prompts.remove(prompt)
        if prompt.outcome != HANDED_OVER:
            self._engine.abort(prompt.request_id)
            self._computing.room_came()
        if prompt.outlet is not None:
            prompt.outlet.forget(prompt)
        if prompt.finding is not None:
            prompt.finding.cancel()
        if prompt.put is not None:
            self._puts.end(prompt.put)
        prompt.span.set_attribute("outcome", prompt.outcome)
        end_span(prompt.span)

    async def _hand_over(self, prompt: Prompt) -> None:
        """Raises PromptFailed."""
        request = prompt.request
        seconds_left = max(0.0, request.generation.deadline_unix_seconds - self._clock())
        try:
            async with asyncio.timeout(seconds_left):
                prompt.outlet = await self._outlets.get(request.decode, request.link_address)
                await self._computing.run(prompt)
                await prompt.handed_over
        except TimeoutError:
            raise PromptFailed(
                FailureReason.DEADLINE, "its deadline passed before it was handed over"
            ) from None
        except LinkError as error:
            raise PromptFailed(
                FailureReason.PEER_LOST, f"its decode worker cannot be reached: {error}"
            ) from error
        except EngineError as error:
            if prompt.handed_over.done():
                await prompt.handed_over  # What ended it there is the cause.
            raise PromptFailed(FailureReason.INTERNAL, str(error)) from error

    def _seek_prefix(self, prompt: Prompt) -> None:
        """Ask the stores while it waits for room: they bring it into memory meanwhile."""
        prefix = self._prefixes.of(prompt.request.generation)
        if prefix.names:
            prompt.prefix = prefix
            prompt.finding = self._spawn("find-prefix", self._prefixes.find(prefix))

    def _failed(self, prompt: Prompt, failure: PromptFailed) -> None:
        self._metrics.failed.labels(failure.reason.value).inc()
        log.info(
            "prompt_failed", request_id=prompt.request_id, reason=failure.reason.value, detail=failure.detail
        )
        if prompt.outlet is not None and prompt.outlet.is_open:
            header = HandOverFailed(
                request_id=prompt.request_id, reason=failure.reason, detail=failure.detail[:1000]
            )
            prompt.outlet.tell(header)
            return
        delta = TokenDelta(
            request_id=prompt.request_id, index=0, token_ids=(), failure=failure.reason, detail=failure.detail
        )
        self._send_tokens(prompt.request.generation.gateway, (delta,))

    def _first_block(self, request: Prefill) -> int:
        """The first block to hand over. The last token is always computed, so its block is among them."""
        return max(0, min(request.first_block, (num_tokens(request.generation) - 1) // self._block_size))

    def _refusal(self, request: Prefill) -> Refused | None:
        if self.is_draining:
            return Refused(reason=RefusalReason.DRAINING, detail="this worker is shutting down")
        if request.generation.deadline_unix_seconds <= self._clock():
            return Refused(reason=RefusalReason.DEADLINE, detail="its deadline passed on the way here")
        if request.generation.request_id in self._aborted_unknown.ids(self._clock()):
            return Refused(reason=RefusalReason.OVERLOADED, detail="it was aborted before it came")
        if num_tokens(request.generation) >= self._max_tokens:
            detail = f"with its first new token it exceeds the {self._max_tokens} tokens of this worker"
            return Refused(reason=RefusalReason.TOO_LONG, detail=detail)
        if len(self.prompts) >= self._max_waiting:
            return Refused(
                reason=RefusalReason.OVERLOADED, detail=f"{self._max_waiting} prompts are waiting already"
            )
        return None
