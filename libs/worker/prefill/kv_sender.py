"""One Link to a decode worker: sends the KV of prompts, in order, as fast as the peer takes it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from libs.engine.outputs import LayerOutput, TokenOutput
from libs.kv.checksum import checksum
from libs.kv.tensors import bytes_of
from libs.request.outcome import FailureReason
from libs.transport.frames import HandOver, HandOverFailed, LayerBlocks, StillQueued, encode_header
from libs.transport.port import Link, LinkError
from libs.worker.metrics import WorkerMetrics
from libs.worker.prefill.layer_group import LayerGroup
from libs.worker.prefill.prompt import Prompt

MAX_IDS_PER_FRAME = 40
"""A header holds 4 KiB; an id may have some 90 characters."""

Release = Callable[[LayerOutput], None]


class KvSender:
    """Queues and sends. What is queued is bounded by the engine's hand-over budget: it makes no more until
    `release` was called for what was sent."""

    def __init__(
        self,
        link: Link,
        release: Release,
        metrics: WorkerMetrics,
        *,
        num_layers: int,
        send_timeout_seconds: float,
    ) -> None:
        self._link, self._release, self._metrics = link, release, metrics
        self._num_layers, self._send_timeout_seconds = num_layers, send_timeout_seconds
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._gathering: dict[str, LayerGroup] = {}
        """Layers of a chunk that wait for the next ones, to share a frame; by request."""
        self._prompts: dict[Prompt, None] = {}
        """In order of arrival."""

    @property
    def is_open(self) -> bool:
        """False once nothing can be sent any more."""
        return self._link.is_open

    def put_layer(self, prompt: Prompt, output: LayerOutput) -> None:
        """A layer's blocks. Dropped if the prompt is over when their turn comes."""
        group = self._gathering.get(prompt.request_id)
        if group is not None and not group.takes(output):
            self._queue_group(prompt)
            group = None
        if group is None:
            group = self._gathering[prompt.request_id] = LayerGroup(output, self._num_layers)
        else:
            group.outputs.append(output)
        if group.is_full:
            self._queue_group(prompt)

    def put_first_token(self, prompt: Prompt, first: TokenOutput) -> None:
        """All layers are put. Dropped if the prompt is over when its turn comes."""
        self._queue_group(prompt)
        self._queue.put_nowait(_Item(prompt, first))

    def add(self, prompt: Prompt) -> None:
        """Its KV goes this way; it fails where the Link is lost before `remove`."""
        self._prompts[prompt] = None

    def remove(self, prompt: Prompt) -> None:
        """The prompt is over: no further layers will come."""
        self._prompts.pop(prompt, None)
        self.drop_layers(prompt)

    def drop_layers(self, prompt: Prompt) -> None:
        """Those that wait for others; they come again, or are not wanted."""
        group = self._gathering.pop(prompt.request_id, None)
        if group is not None:
            self._let_go(group)

    def put_failure(self, failed: HandOverFailed) -> None:
        """There will be no first token."""
        self._queue.put_nowait(_Item(None, failed))

    async def renew(self) -> None:
        """Tell the decode worker which prompts are still to come. A lost Link is noticed by `serve`."""
        request_ids = tuple(prompt.request_id for prompt in self._prompts)
        for start in range(0, len(request_ids), MAX_IDS_PER_FRAME):
            some = request_ids[start : start + MAX_IDS_PER_FRAME]
            try:
                await self._send(encode_header(StillQueued(request_ids=some)))
            except LinkError:
                return

    async def serve(self) -> str:
        """Send until the Link is lost, whose reason is returned. All that is queued is released then."""
        reason = "this worker is closing"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_queued())
                tasks.create_task(self._watch())
        except* LinkError as lost:
            reason = str(lost.exceptions[0])
        finally:
            while not self._queue.empty():
                self._let_go(self._queue.get_nowait().content)
            for group in self._gathering.values():
                self._let_go(group)
            self._gathering.clear()
            await self._link.close()
        for prompt in self._prompts:
            prompt.fail(FailureReason.PEER_LOST, f"the Link to its decode worker ended: {reason}")
        return reason

    async def close(self) -> None:
        """Idempotent; `serve` returns."""
        await self._link.close()

    async def _watch(self) -> NoReturn:
        """Decode workers send nothing; waiting for it is how the end of the Link is seen."""
        while True:
            (await self._link.receive()).release()

    async def _send_queued(self) -> NoReturn:
        while True:
            item = await self._queue.get()
            try:
                await self._send_item(item)
            finally:
                self._let_go(item.content)

    def _queue_group(self, prompt: Prompt) -> None:
        group = self._gathering.pop(prompt.request_id, None)
        if group is not None:
            self._queue.put_nowait(_Item(prompt, group))

    async def _send_item(self, item: "_Item") -> None:
        prompt = item.prompt
        if isinstance(item.content, HandOverFailed):
            await self._send(encode_header(item.content))
        elif prompt is not None and not prompt.is_over:
            if isinstance(item.content, TokenOutput):
                await self._send(encode_header(_hand_over(prompt, item.content)))
                prompt.finish()
            else:
                await self._send_group(prompt, item.content)

    async def _send_group(self, prompt: Prompt, group: LayerGroup) -> None:
        first = group.outputs[0]
        body = bytes_of(group.joined())
        header = LayerBlocks(
            request_id=prompt.request_id,
            layer=first.layer,
            num_layers=len(group.outputs),
            first_block=first.first_block,
            num_blocks=first.blocks.shape[0],
            checksum=checksum(body),
        )
        await self._link.send(encode_header(header), body, timeout_seconds=self._send_timeout_seconds)
        self._metrics.transfer_bytes.labels("sent").inc(body.size)
        self._metrics.transfer_seconds.labels("sent").observe(time.monotonic() - group.made_at)

    async def _send(self, header: bytes) -> None:
        await self._link.send(header, timeout_seconds=self._send_timeout_seconds)

    def _let_go(self, content: LayerGroup | TokenOutput | HandOverFailed) -> None:
        if isinstance(content, LayerGroup):
            for output in content.outputs:
                self._release(output)


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """What waits for its turn; without a prompt it is sent in any case."""

    prompt: Prompt | None
    content: LayerGroup | TokenOutput | HandOverFailed


def _hand_over(prompt: Prompt, first: TokenOutput) -> HandOver:
    return HandOver(
        request_id=prompt.request_id,
        token_id=first.token_id,
        finish=first.finish,
        logprobs=first.logprobs,
        num_cached_tokens=first.num_cached_tokens,
        prefill_started_unix_seconds=first.prefill_started_unix_seconds,
    )
