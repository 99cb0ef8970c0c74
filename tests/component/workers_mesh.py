"""Router, workers and store as they really live, in one process: in-memory bus and Links, a tiny model.

`Gateway` stands for one: it asks and listens as the real one does, and keeps what it hears.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from libs.bus.memory_broker import MemoryBroker
from libs.bus.memory_bus import MemoryBus
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
from libs.engine.engine import Engine, EngineSettings
from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput
from libs.model.config import Architecture, ModelConfig
from libs.model.model import Model
from libs.model.random_model import random_model
from libs.request.generation import Generation, pack_token_ids
from libs.request.outcome import FailureReason, FinishReason, RefusalReason
from libs.request.sampling import SamplingParams, TokenLogprobs
from libs.runtime.identity import Identity, new_identity
from libs.runtime.life import Service, Stop
from libs.runtime.runtime import Runtime
from libs.runtime.service import live_on
from libs.runtime.settings import RuntimeSettings
from libs.transport.choose import make_transport
from libs.transport.memory_transport import MemoryNetwork
from libs.transport.port import Transport
from services.decode_worker.service import DecodeWorkerService
from services.decode_worker.settings import DecodeWorkerSettings
from services.kv_store.service import KvStoreService
from services.kv_store.settings import KvStoreSettings
from services.prefill_worker.service import PrefillWorkerService
from services.prefill_worker.settings import PrefillWorkerSettings
from services.router.service import RouterService
from services.router.settings import RouterSettings

BLOCK_SIZE = 4
VOCAB_SIZE = 96
CONFIG = ModelConfig(
    architecture=Architecture.LLAMA,
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=VOCAB_SIZE,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=512,
    eos_token_ids=(0,),
)

WrapTransport = Callable[[Transport], Transport]


def tiny_model() -> Model:
    return random_model(CONFIG, seed=7, dtype=torch.float32)


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1000 + num_tokens)
    return torch.randint(1, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@dataclass
class Hosted:
    """A service with its runtime at hand."""

    service: Any
    identity: Identity
    bus: MemoryBus
    stop: Stop = field(default_factory=Stop)
    runtime: Runtime | None = None
    task: "asyncio.Task[int] | None" = None

    def __post_init__(self) -> None:
        if hasattr(self.service, "load"):
            self.load = self.service.load

    async def open(self, runtime: Runtime) -> None:
        self.runtime = runtime
        await self.service.open(runtime)

    async def drain(self) -> None:
        await self.service.drain()

    async def close(self) -> None:
        await self.service.close()

    @property
    def incarnation(self) -> str:
        return self.identity.incarnation

    @property
    def presence(self) -> Presence:
        assert self.runtime is not None
        return self.runtime.presence

    def gauge(self, name: str, **labels: str) -> float:
        assert self.runtime is not None
        return self.runtime.registry.get_sample_value(name, labels) or 0.0


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
        async with asyncio.timeout(20):
            await self.ended.wait()
        return self

    async def until(self, num_tokens: int) -> None:
        async with asyncio.timeout(20):
            while len(self.tokens) < num_tokens and not self.ended.is_set():
                self.heard.clear()
                await self.heard.wait()


class Gateway:
    """Asks for sequences and listens for their tokens."""

    def __init__(self, mesh: "WorkersMesh", name: str) -> None:
        self.mesh, self.bus = mesh, MemoryBus(mesh.broker)
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
        seconds: float = 30.0,
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
            Reserve(generation=generation, prefill=prefill), to=decode, timeout_seconds=5
        )

    async def prefill(
        self, generation: Generation, decode: str, prefill: str, link_address: str, first_block: int = 0
    ) -> Queued | Refused:
        message = Prefill(
            generation=generation, decode=decode, link_address=link_address, first_block=first_block
        )
        return await self.bus.request(message, to=prefill, timeout_seconds=5)

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


class WorkersMesh:
    """What runs, by name."""

    def __init__(self) -> None:
        self.broker, self.network = MemoryBroker(), MemoryNetwork()
        self.hosted: dict[str, Hosted] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.gateways: list[Gateway] = []

    def open_transport(self, wrap: WrapTransport | None) -> Callable[[Any, Runtime], Transport]:
        def open_one(settings: RuntimeSettings, runtime: Runtime) -> Transport:
            transport = make_transport("memory", runtime.incarnation, b"secret", network=self.network)
            return wrap(transport) if wrap else transport

        return open_one

    @staticmethod
    async def open_model(settings: Any, runtime: Runtime) -> Model:
        return tiny_model()

    async def prefill(
        self, name: str = "prefill-0", *, wrap: WrapTransport | None = None, **settings: Any
    ) -> Hosted:
        made = PrefillWorkerSettings(
            **{
                "block_size": BLOCK_SIZE,
                "num_blocks": 256,
                "threads": 1,
                "max_num_batched_tokens": 32,
                **settings,
            }
        )
        service = PrefillWorkerService(
            made, open_model=self.open_model, open_transport=self.open_transport(wrap)
        )
        return await self.host(ServiceKind.PREFILL_WORKER, name, made, service)

    async def decode(
        self,
        name: str = "decode-0",
        *,
        wrap: WrapTransport | None = None,
        clock: Callable[[], float] = time.time,
        **settings: Any,
    ) -> Hosted:
        made = DecodeWorkerSettings(**{"block_size": BLOCK_SIZE, "num_blocks": 256, "threads": 1, **settings})
        service = DecodeWorkerService(
            made, open_model=self.open_model, open_transport=self.open_transport(wrap), clock=clock
        )
        return await self.host(ServiceKind.DECODE_WORKER, name, made, service)

    async def store(
        self, name: str = "store-0", *, wrap: WrapTransport | None = None, **settings: Any
    ) -> Hosted:
        made = KvStoreSettings(**{"memory_gib": 0.01, **settings})
        return await self.host(
            ServiceKind.KV_STORE, name, made, KvStoreService(made, open_transport=self.open_transport(wrap))
        )

    async def router(self, name: str = "router-0", **settings: Any) -> Hosted:
        made = RouterSettings(**settings)
        return await self.host(ServiceKind.ROUTER, name, made, RouterService(made))

    async def gateway(self, name: str = "gateway-0") -> Gateway:
        gateway = Gateway(self, name)
        await gateway.bus.subscribe(TokenFrame, gateway.hear, at=gateway.incarnation)
        self.tasks.append(asyncio.create_task(gateway.beat()))
        self.gateways.append(gateway)
        return gateway

    async def host(self, kind: ServiceKind, name: str, settings: Any, service: Service) -> Hosted:
        hosted = Hosted(service, new_identity(kind, name), MemoryBus(self.broker))
        hosted.task = asyncio.create_task(
            live_on(hosted.bus, hosted.identity, settings, hosted, hosted.stop, serves_probes=False)
        )
        self.hosted[name] = hosted
        async with asyncio.timeout(20):
            while hosted.runtime is None or hosted.presence.state is not ServiceState.READY:
                assert not hosted.task.done(), f"{name} did not start"
                await asyncio.sleep(0.005)
        return hosted

    async def stop(self, hosted: Hosted) -> int:
        hosted.stop.asked.set()
        assert hosted.task is not None
        code = await hosted.task
        await hosted.bus.close()
        return code

    async def kill(self, hosted: Hosted) -> None:
        """No good-bye on the bus; its Links break."""
        hosted.bus.disconnect()
        hosted.stop.skip_drain = True
        await self.stop(hosted)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for hosted in self.hosted.values():
            hosted.stop.skip_drain = True
            if hosted.task is not None and not hosted.task.done():
                await self.stop(hosted)
        for gateway in self.gateways:
            await gateway.bus.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """States of several services have no common event; look again and again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110 - gauges announce nothing
                    await asyncio.sleep(0.005)
        assert condition()

    async def until_idle(self) -> None:
        """Every gauge that counts something held is back at nothing."""
        names = (
            "kvmesh_num_requests_running",
            "kvmesh_num_requests_waiting",
            "kvmesh_num_requests_reserved",
            "kvmesh_num_requests_held",
            "kvmesh_num_used_blocks",
            "kvmesh_num_unsent_deltas",
            "kvmesh_store_num_staged_blocks",
            "kvmesh_store_put_kept_bytes",
        )
        live = [hosted for hosted in self.hosted.values() if hosted.task and not hosted.task.done()]
        await self.until(lambda: all(hosted.gauge(name) == 0 for hosted in live for name in names))


@asynccontextmanager
async def running_mesh() -> AsyncIterator[WorkersMesh]:
    mesh = WorkersMesh()
    try:
        yield mesh
    finally:
        await mesh.close()


class _Alone:
    """Hears an engine that nobody shares with."""

    def __init__(self) -> None:
        self.tokens: list[TokenOutput] = []
        self.ended = asyncio.Event()

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        self.tokens += tokens
        if tokens[-1].finish:
            self.ended.set()

    def on_layer(self, output: LayerOutput) -> None: ...

    def on_prompt_done(self, output: TokenOutput) -> None: ...

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None: ...

    def on_failed(self, failure: SequenceFailed) -> None:
        raise AssertionError(failure)


class Reference:
    """One engine, one sequence at a time: what the mesh's text must be."""

    def __init__(self) -> None:
        self._listener = _Alone()
        settings = EngineSettings(
            max_model_len=512, num_blocks=256, block_size=BLOCK_SIZE, num_threads=1, prefix_cache=False
        )
        self._engine = Engine(tiny_model(), settings, self._listener)

    async def __aenter__(self) -> "Reference":
        await self._engine.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._engine.close()

    async def tokens(self, generation: Generation) -> list[TokenOutput]:
        self._listener.tokens.clear()
        self._listener.ended.clear()
        await self._engine.reserve(generation, whole_prompt=False)
        await self._engine.begin(generation.request_id, num_computed_tokens=0)
        await self._listener.ended.wait()
        return list(self._listener.tokens)
