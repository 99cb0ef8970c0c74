"""Prompts whose KV goes to decode workers: taken, run, handed over.

How a prompt ends, and what tells its gateway. Handed over: the decode worker sends the first token. Failed
while its Link is there: the decode worker is told, frees its blocks and tells the gateway. Failed without a
Link: a token frame from here, because the decode worker is dead or out of reach. Should both tell, the
first counts.
"""

import asyncio
import time
from collections.abc import Callable

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
from libs.worker.admission import Admission
from libs.worker.metrics import WorkerMetrics
from libs.worker.prefill.block_queue import BlockQueue
from libs.worker.prefill.kv_senders import KvSenders
from libs.worker.prefill.prefill_request import PrefillRequest
from libs.worker.prefill.prompt import PromptFailed
from libs.worker.prefill.prompt_runs import PromptRuns
from libs.worker.settings import WorkerSettings
from libs.worker.token_sender import SendTokens

HANDED_OVER = "handed_over"

log = structlog.get_logger()


class PrefillRequests:
    """By request id, in order of arrival; one task each."""

    def __init__(
        self,
        engine: Engine,
        runs: PromptRuns,
        blocks: BlockQueue,
        senders: KvSenders,
        admission: Admission,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
        spawn: Spawn,
        send_tokens: SendTokens,
        *,
        max_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`max_tokens`: of a sequence, its first new token included."""
        self._engine, self._runs, self._blocks, self._senders = engine, runs, blocks, senders
        self._admission, self._metrics, self._settings = admission, metrics, settings
        self._spawn, self._send_tokens, self._clock = spawn, send_tokens, clock
        self._max_tokens = max_tokens
        self._prompts: dict[str, PrefillRequest] = {}
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._prompts)

    async def wait_empty(self) -> None:
        """Returns when none is here."""
        await self._emptied.wait()

    # What gateways ask

    def take(self, request: Prefill) -> Queued | Refused:
        """Queue a prompt. Asked twice, it is queued once."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._metrics.refused.labels(refusal.reason.value).inc()
            return refusal
        if request.generation.request_id not in self._prompts:
            self._take(request)
        return Queued(num_waiting=len(self._prompts))

    def abort(self, request_id: str) -> bool:
        """Nobody wants it any more. False where it is not here."""
        prompt = self._prompts.get(request_id)
        if prompt is not None and prompt.task is not None:
            prompt.task.cancel()
        return prompt is not None

    def gateway_gone(self, gateway: str) -> None:
        """Nobody reads the tokens of these any more."""
        for prompt in list(self._prompts.values()):
            if prompt.generation.gateway == gateway:
                self.abort(prompt.request_id)

    # What the engine makes

    def on_layer(self, output: LayerOutput) -> None:
        """See EngineListener: on its way at once, while the next layer is computed."""
        prompt = self._prompts.get(output.sequence_id)
        if prompt is None or prompt.sender is None or not prompt.sender.is_open:
            self._engine.release_layer(output)
            return
        if prompt.upload is not None:
            prompt.upload.collect(output)
        prompt.sender.put_layer(prompt, output)

    def on_prompt_done(self, output: TokenOutput) -> None:
        """See EngineListener: the first token follows its layers."""
        self._blocks.freed()
        prompt = self._prompts.get(output.sequence_id)
        if prompt is None or prompt.sender is None:
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
        prompt.sender.put_first_token(prompt, output)

    def on_failed(self, failure: SequenceFailed) -> None:
        """See EngineListener."""
        prompt = self._prompts.get(failure.sequence_id)
        if prompt is not None:
            prompt.fail(failure.reason, failure.detail)

    # The way of one prompt

    def _take(self, request: Prefill) -> None:
        generation = request.generation
        prompt = PrefillRequest(
            generation=generation,
            hands_over=True,
            # The last token is always computed, so its block is among those handed over.
            first_block=max(
                0, min(request.first_block, (num_tokens(generation) - 1) // self._settings.block_size)
            ),
            request=request,
            arrived_at=self._clock(),
            span=start_span("prefill", generation.traceparent, request_id=generation.request_id),
        )
        self._prompts[prompt.request_id] = prompt
        self._emptied.clear()
        self._admission.taken(prompt.request_id)
        self._runs.add(prompt)
        prompt.task = self._spawn("prompt", self._run(prompt))
        # Not in `_run`: a task cancelled before its first step never gets there.
        prompt.task.add_done_callback(lambda _: self._over(prompt))

    async def _run(self, prompt: PrefillRequest) -> None:
        try:
            await self._hand_over(prompt)
            prompt.outcome = HANDED_OVER
        except PromptFailed as failure:
            prompt.outcome = failure.reason.value
            self._failed(prompt, failure)

    def _over(self, prompt: PrefillRequest) -> None:
        """However it ended, nothing of it stays."""
        self._prompts.pop(prompt.request_id, None)
        if not self._prompts:
            self._emptied.set()
        if prompt.outcome != HANDED_OVER:
            self._engine.abort(prompt.request_id)
            self._blocks.freed()
        self._runs.remove(prompt)
        if prompt.sender is not None:
            prompt.sender.remove(prompt)
        prompt.span.set_attribute("outcome", prompt.outcome)
        end_span(prompt.span)

    async def _hand_over(self, prompt: PrefillRequest) -> None:
        """Raises PromptFailed."""
        request = prompt.request
        seconds_left = max(0.0, request.generation.deadline_unix_seconds - self._clock())
        try:
            async with asyncio.timeout(seconds_left):
                prompt.sender = await self._senders.get(request.decode, request.link_address)
                prompt.sender.add(prompt)
                await self._runs.run(prompt)
                await prompt.done
        except TimeoutError:
            raise PromptFailed(
                FailureReason.DEADLINE, "its deadline passed before it was handed over"
            ) from None
        except LinkError as error:
            raise PromptFailed(
                FailureReason.PEER_LOST, f"its decode worker cannot be reached: {error}"
            ) from error
        except EngineError as error:
            if prompt.done.done():
                await prompt.done  # What ended it there is the cause.
            raise PromptFailed(FailureReason.INTERNAL, str(error)) from error

    def _failed(self, prompt: PrefillRequest, failure: PromptFailed) -> None:
        self._metrics.failed.labels(failure.reason.value).inc()
        log.info(
            "prompt_failed", request_id=prompt.request_id, reason=failure.reason.value, detail=failure.detail
        )
        if prompt.sender is not None and prompt.sender.is_open:
            header = HandOverFailed(
                request_id=prompt.request_id, reason=failure.reason, detail=failure.detail[:1000]
            )
            prompt.sender.put_failure(header)
            return
        delta = TokenDelta(
            request_id=prompt.request_id, index=0, token_ids=(), failure=failure.reason, detail=failure.detail
        )
        self._send_tokens(prompt.generation.gateway, (delta,))

    def _refusal(self, request: Prefill) -> Refused | None:
        if (refusal := self._admission.refusal(request.generation)) is not None:
            return refusal
        if num_tokens(request.generation) >= self._max_tokens:
            detail = f"with its first new token it exceeds the {self._max_tokens} tokens of this worker"
            return Refused(reason=RefusalReason.TOO_LONG, detail=detail)
        if len(self._prompts) >= self._settings.max_waiting:
            return Refused(
                reason=RefusalReason.OVERLOADED,
                detail=f"{self._settings.max_waiting} prompts are waiting already",
            )
        return None
