"""A gateway as it really lives, on a bus with a router and workers that do what a test says."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httpx
import msgspec
import openai

from libs.bus.bus import Bus
from libs.bus.messages.generation import (
    Abort,
    Place,
    Placed,
    Prefill,
    Queued,
    Refused,
    Reserve,
    Reserved,
    TokenDelta,
    TokenFrame,
    Unplace,
)
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.model.tokenizer import Tokenizer
from libs.request.generation import Generation, num_tokens
from libs.request.outcome import FinishReason, RefusalReason
from libs.request.sampling import TokenLogprobs
from libs.runtime.identity import new_identity
from libs.runtime.life import Stop
from libs.runtime.service import live_on
from services.gateway.generation.model import TextCodec, load_codec
from services.gateway.service import GatewayService
from services.gateway.settings import GatewaySettings

MODEL = "smollm2-135m-instruct"
FINGERPRINT, BLOCK_SIZE = "f", 16

Behaviour = Callable[["Worker", Generation], Awaitable[None]]


@lru_cache(maxsize=1)
def codec(model: str) -> TextCodec:
    """Loaded once per process, for all gateways."""
    return load_codec(model)


def tokenizer() -> Tokenizer:
    return codec(MODEL).tokenizer


def words(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def say(text: str, finish: FinishReason = FinishReason.LENGTH) -> Behaviour:
    """Give the tokens of a text, one per frame; with STOP the end-of-text token follows."""

    async def behave(worker: "Worker", generation: Generation) -> None:
        tokens = words(text) + ([tokenizer().eos_token_ids[0]] if finish is FinishReason.STOP else [])
        tokens = tokens[: generation.sampling.max_tokens]
        for index in range(first_index(generation), len(tokens)):
            is_last = index == len(tokens) - 1
            await worker.give(generation, index, tokens[index : index + 1], finish if is_last else None)

    return behave


def say_part(text: str, num: int) -> Behaviour:
    """Give the first `num` tokens of a text and then no more."""

    async def behave(worker: "Worker", generation: Generation) -> None:
        tokens = words(text)
        for index in range(first_index(generation), min(num, len(tokens))):
            await worker.give(generation, index, tokens[index : index + 1])
        worker.came_to_rest.set()
        await asyncio.Event().wait()

    return behave


async def stay_silent(worker: "Worker", _generation: Generation) -> None:
    worker.came_to_rest.set()
    await asyncio.Event().wait()


def first_index(generation: Generation) -> int:
    return num_tokens(generation) - generation.num_prompt_tokens


@dataclass
class Worker:
    """Decode worker, prefill worker, or both."""

    bus: Bus
    presence: Presence
    behaviour: Behaviour = field(default_factory=lambda: say("Hello there."))
    reserve_answer: Refused | None = None
    prefill_answer: Refused | None = None
    num_cached_blocks: int = 0
    generations: list[Generation] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    came_to_rest: asyncio.Event = field(default_factory=asyncio.Event)
    saw_abort: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    num_reports: int = 0
    is_dead: bool = False

    @property
    def incarnation(self) -> str:
        return self.presence.incarnation

    async def open(self) -> None:
        await self.bus.serve(Reserve, self._reserve, at=self.incarnation)
        await self.bus.serve(Prefill, self._prefill, at=self.incarnation)
        await self.bus.subscribe(Abort, self._abort, at=self.incarnation)
        await self.beat()

    async def beat(self) -> None:
        await self.bus.put_presence(self.incarnation, msgspec.msgpack.encode(self.presence))

    async def report(self, load: WorkerLoad) -> None:
        self.num_reports += 1
        report = LoadReport(
            kind=self.presence.kind, incarnation=self.incarnation, sequence=self.num_reports, load=load
        )
        await self.bus.publish(report)

    async def die(self) -> None:
        self.is_dead = True
        for task in self.tasks.values():
            task.cancel()
        await self.bus.delete_presence(self.incarnation)

    async def give(
        self, generation: Generation, index: int, token_ids: list[int], finish: FinishReason | None = None
    ) -> None:
        """One frame with one delta, with made-up log-probabilities where some are asked for."""
        logprobs: tuple[TokenLogprobs, ...] = ()
        if (num_top := generation.sampling.logprobs) is not None:
            logprobs = tuple(
                TokenLogprobs(-0.5, tuple(range(t, t + num_top)), tuple(-0.5 - i for i in range(num_top)))
                for t in token_ids
            )
        delta = TokenDelta(
            generation.request_id,
            index,
            tuple(token_ids),
            logprobs=logprobs,
            finish=finish,
            num_cached_tokens=2 if index == 0 else 0,
        )
        await self.send(generation, delta)

    async def send(self, generation: Generation, *deltas: TokenDelta) -> None:
        await self.bus.publish(
            TokenFrame(worker=self.incarnation, deltas=list(deltas)), to=generation.gateway
        )
        await asyncio.sleep(0)

    async def _reserve(self, reserve: Reserve) -> Reserved | Refused:
        if self.reserve_answer is not None:
            return self.reserve_answer
        self.generations.append(reserve.generation)
        self.tasks[reserve.generation.request_id] = asyncio.create_task(
            _run(self.behaviour(self, reserve.generation))  # type: ignore[arg-type]  # behaviours are coroutines
        )
        return Reserved(link_address="nowhere", num_cached_blocks=self.num_cached_blocks)

    async def _prefill(self, prefill: Prefill) -> Queued | Refused:
        self.prompts.append(prefill.generation.request_id)
        self.first_blocks.append(prefill.first_block)
        return self.prefill_answer or Queued()

    def _abort(self, abort: Abort) -> None:
        self.aborted.append(abort.request_id)
        self.saw_abort.set()
        if task := self.tasks.get(abort.request_id):
            task.cancel()


async def _run(work: Any) -> None:
    await work


@dataclass
class Mesh:
    """A router that takes the first worker of each role, and the workers."""

    bus: Bus
    decodes: list[Worker] = field(default_factory=list)
    prefills: list[Worker] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    unplaced: list[str] = field(default_factory=list)
    place_answers: list[Refused] = field(default_factory=list)
    holds_places: bool = False
    saw_place: asyncio.Event = field(default_factory=asyncio.Event)
    saw_unplace: asyncio.Event = field(default_factory=asyncio.Event)
    router: Presence = field(
        default_factory=lambda: Presence(
            kind=ServiceKind.ROUTER, name="router", incarnation="r0", state=ServiceState.READY
        )
    )
    gateway: Presence | None = None
    stop: Stop | None = None
    gateway_bus: Bus | None = None
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    async def open(self) -> None:
        await self.bus.serve(Place, self._place)
        await self.bus.subscribe(Unplace, self._unplace)
        await self.bus.put_presence("r0", msgspec.msgpack.encode(self.router))

    async def add(self, kind: ServiceKind, name: str, **facts: Any) -> Worker:
        presence = Presence(
            kind=kind,
            name=name,
            incarnation=f"{name}-i",
            state=ServiceState.READY,
            model=MODEL,
            model_fingerprint=f"{FINGERPRINT}-{BLOCK_SIZE}",
            **facts,
        )
        worker = Worker(self.bus, presence)
        await worker.open()
        (self.decodes if kind is ServiceKind.DECODE_WORKER else self.prefills).append(worker)
        return worker

    @property
    def url(self) -> str:
        assert self.gateway is not None
        return self.gateway.http_address

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        plain = httpx.AsyncClient(verify=False)
        given = {"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "http_client": plain}
        options = {**given, **options}
        self.clients.append(openai.AsyncOpenAI(**options))
        return self.clients[-1]

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20, verify=False)  # reading CAs takes long

    async def metric(self, name: str) -> float:
        async with self.http() as http:
            text = (await http.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def _place(self, place: Place) -> Placed | Refused:
        self.places.append(place)
        self.saw_place.set()
        if self.place_answers:
            return self.place_answers.pop(0)
        if self.holds_places:
            await asyncio.Event().wait()
        decodes, prefills = (
            [w for w in workers if not w.is_dead and w.incarnation not in place.exclude]
            for workers in (self.decodes, self.prefills)
        )
        if not decodes or not (prefills or decodes[0].presence.runs_prompts):
            return Refused(reason=RefusalReason.NO_WORKERS, detail="none", retry_after_seconds=0.05)
        return Placed(decode=decodes[0].incarnation, prefill=prefills[0].incarnation if prefills else "")

    def _unplace(self, unplace: Unplace) -> None:
        self.unplaced.append(unplace.request_id)
        self.saw_unplace.set()


@asynccontextmanager
async def running_gateway(gateway_bus: Bus, mesh_bus: Bus, **settings: Any) -> AsyncGenerator[Mesh]:
    """A gateway with one prefill and one decode worker; afterwards it must end by itself with exit code 0."""
    mesh = Mesh(mesh_bus)
    await mesh.open()
    await mesh.add(ServiceKind.PREFILL_WORKER, "prefill-0")
    await mesh.add(ServiceKind.DECODE_WORKER, "decode-0")
    read = GatewaySettings(**{"port": 0, "drain_timeout_seconds": 5.0, **settings})
    mesh.stop = Stop()
    identity = new_identity(ServiceKind.GATEWAY, "gateway")
    living = asyncio.create_task(
        live_on(
            gateway_bus,
            identity,
            read,
            GatewayService(read, open_codec=codec),
            mesh.stop,
            serves_probes=False,
        )
    )
    beating = asyncio.create_task(_beat(mesh))
    try:
        mesh.gateway = await _until_ready(mesh, identity.incarnation, living)
        yield mesh
    finally:
        for client in mesh.clients:
            await client.close()
        mesh.stop.asked.set()
        beating.cancel()
        tasks = [task for worker in mesh.decodes for task in worker.tasks.values()]
        code = await living
        for task in tasks:
            task.cancel()
        await asyncio.gather(beating, *tasks, return_exceptions=True)
    assert code == 0


async def _until_ready(mesh: Mesh, incarnation: str, living: "asyncio.Task[int]") -> Presence:
    """Ready by its own word, and by its /ready, which also needs that it heard of the workers."""
    async with asyncio.timeout(20), mesh.bus.watch_presence() as entries:
        async for entry in entries:
            assert not living.done(), living.result()
            if entry.key == incarnation and entry.value is not None:
                gateway = msgspec.msgpack.decode(entry.value, type=Presence)
                if gateway.state is ServiceState.READY:
                    break
    async with asyncio.timeout(10), httpx.AsyncClient(base_url=gateway.http_address, verify=False) as http:
        while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110  (as a load balancer does)
            await asyncio.sleep(0.01)
    return gateway


async def _beat(mesh: Mesh) -> None:
    while True:
        for worker in [*mesh.decodes, *mesh.prefills]:
            if not worker.is_dead:
                await worker.beat()
        await mesh.bus.put_presence("r0", msgspec.msgpack.encode(mesh.router))
        await asyncio.sleep(0.5)
