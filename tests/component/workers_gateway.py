"""A gateway as workers know it: it asks and listens as the real one does, and keeps what it hears."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.generation import (
    Abort,
    Place,
    Placed,
    Prefill,
    Queued,
    Refused,
    Reserve,
    Reserved,
    TokenFrame,
    Unplace,
)
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FailureReason, FinishReason, RefusalReason
from libs.request.sampling import SamplingParams, TokenLogprobs
from libs.runtime.identity import new_identity


@dataclass
class Stream:
    """What a gateway heard of one attempt."""

    generation: Generation
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: FailureReason | None = None
    detail: str = ""
    num_cached_tokens: int = 0
    num_cached_blocks: int = 0
    num_frames: int = 0
    prefill: str = ""
    decode: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def end(self) -> "Stream":
        async with asyncio.timeout(60):
            await self.ended.wait()
        return self

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(60):
            while len(self.tokens) < num_tokens and not self.ended.is_set():
                self.heard.clear()
                await self.heard.wait()


class Gateway:
    """Asks for sequences and listens for their tokens."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self.bus = MemoryBus(broker)
        self.identity = new_identity(ServiceKind.GATEWAY, name)
        self.streams: dict[str, Stream] = {}
        self.num_asked = self.num_refused = 0

    @property
    def incarnation(self) -> str:
        return self.identity.incarnation

    async def beat(self) -> None:
        presence = Presence(
            kind=ServiceKind.GATEWAY,
            name=self.identity.name,
            incarnation=self.incarnation,
            state=ServiceState.READY,
        )
        while True:
            if self.bus.is_connected:
                await self.bus.put_presence(self.incarnation, msgspec.msgpack.encode(presence))
            await asyncio.sleep(0.5)

    def hear(self, frame: TokenFrame) -> None:
        for delta in frame.deltas:
            stream = self.streams.get(delta.request_id)
            if stream is None or stream.ended.is_set():
                continue
            if delta.failure is None:
                first = stream.generation.token_ids
                assert delta.index == len(first) // 4 - stream.generation.num_prompt_tokens + len(
                    stream.tokens
                )
            stream.num_frames += 1
            stream.tokens += delta.token_ids
            stream.logprobs += delta.logprobs
            stream.num_cached_tokens += delta.num_cached_tokens
            stream.finish, stream.failure, stream.detail = delta.finish, delta.failure, delta.detail
            stream.heard.set()
            if delta.finish or delta.failure:
                stream.ended.set()

    def generation(
        self,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        max_tokens: int = 8,
        seconds: float = 60.0,
        cache_salt: str = "",
        **sampling: Any,
    ) -> Generation:
        self.num_asked += 1
        return Generation(
            request_id=f"{self.identity.name}-{self.num_asked}",
            token_ids=pack_token_ids([*prompt, *output]),
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(
                **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
            ),
            gateway=self.incarnation,
            deadline_unix_seconds=time.time() + seconds,
            cache_salt=cache_salt,
        )

    def listen(self, generation: Generation) -> Stream:
        stream = self.streams[generation.request_id] = Stream(generation)
        return stream

    async def place(self, generation: Generation) -> Placed | Refused:
        place = Place(
            request_id=generation.request_id,
            num_tokens=len(generation.token_ids) // 4,
            max_new_tokens=generation.sampling.max_tokens,
            deadline_unix_seconds=generation.deadline_unix_seconds,
            traceparent=generation.traceparent,
        )
        return await self.bus.request(place, timeout_seconds=20)

    async def reserve(self, generation: Generation, decode: str, prefill: str) -> Reserved | Refused:
        return await self.bus.request(
            Reserve(generation=generation, prefill=prefill), to=decode, timeout_seconds=20
        )

    async def prefill(
        self, generation: Generation, decode: str, prefill: str, link_address: str, first_block: int = 0
    ) -> Queued | Refused:
        message = Prefill(
            generation=generation, decode=decode, link_address=link_address, first_block=first_block
        )
        return await self.bus.request(message, to=prefill, timeout_seconds=20)

    async def place_and_reserve(self, generation: Generation) -> tuple[str, str, Reserved | Refused]:
        while True:
            placed = await self.place(generation)
            assert isinstance(placed, Placed), placed
            reserved = await self.reserve(generation, placed.decode, placed.prefill)
            if isinstance(reserved, Reserved) or reserved.reason is not RefusalReason.OVERLOADED:
                return placed.prefill, placed.decode, reserved
            self.num_refused += 1
            await self.bus.publish(Unplace(request_id=generation.request_id))
            await asyncio.sleep(0.05)

    async def begin(self, generation: Generation, *, prefill: str = "", decode: str = "") -> Stream:
        """The whole way; through the router, again after a refused reservation, unless the pair is given."""
        stream = self.listen(generation)
        if decode:
            reserved = await self.reserve(generation, decode, prefill)
        else:
            prefill, decode, reserved = await self.place_and_reserve(generation)
        stream.prefill, stream.decode = prefill, decode
        assert isinstance(reserved, Reserved), reserved
        if prefill:
            stream.num_cached_blocks = reserved.num_cached_blocks
            queued = await self.prefill(
                generation, decode, prefill, reserved.link_address, reserved.num_cached_blocks
            )
            assert isinstance(queued, Queued), queued
        return stream

    async def generate(
        self, prompt: Sequence[int], *, prefill: str = "", decode: str = "", **how: Any
    ) -> Stream:
        stream = await self.begin(self.generation(prompt, **how), prefill=prefill, decode=decode)
        return await stream.end()

    async def abort(self, stream: Stream) -> None:
        request_id = stream.generation.request_id
        stream.ended.set()
        for worker in filter(None, (stream.prefill, stream.decode)):
            await self.bus.publish(Abort(request_id=request_id), to=worker)
        await self.bus.publish(Unplace(request_id=request_id))
