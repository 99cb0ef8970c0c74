"""Modules of one worker migrate while 16 sequences decode on it: the gaps that clients notice, what is
copied, and what a step takes longer while a module is away."""

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import msgspec

from libs.bus.messages.presence import Presence
from libs.cost.migration import ModelShape, kv_bytes, shape_of
from libs.placement.module import Module, heads_of, whole_layers
from tests.bench.figures import Figure, Say
from tests.bench.mesh import running_mesh

DTYPES = ("float32", "bfloat16")
MESH = (
    *("--prefill", "1", "--decode", "2", "--stores", "0", "--threads", "1", "--no-automatic"),
    *("--session-stickiness-seconds", "1000", "--num-blocks", "1024", "--max-model-len", "2048"),
)
NUM_STREAMS = 16
PROMPT = "A story about {number} people of a small town, told slowly and in plain words.\n"
"""Plain words have plain answers: each of their tokens is text, and clients see it. Bytes of a character that
is not whole yet are no text, and would look like a gap."""
ANSWER_TOKENS = 1900
"""More than there is time for."""
SESSION = "bench"
"""All streams are of one session, which stays with one decode worker: the owner of what migrates."""
WATCH_SECONDS = 1.2
"""How long steps are watched before a migration and after it."""
AFTERMATH_SECONDS = 0.1
"""What comes so soon after a migration still counts as during it."""
MAX_STEPS_HEADS, MAX_STEPS_LAYERS = 3.0, 5.0
"""Aims: median steps that the longest gap between two tokens may last while such a module migrates."""
POLL_SECONDS = 0.03
START_SECONDS = 60.0
MIB = 1 << 20


@dataclass
class Arrivals:
    """Times of what arrived on one stream, in seconds of `time.perf_counter`."""

    times: list[float] = field(default_factory=list[float])

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between arrivals, where any part of the gap lies in the span."""
        return [later - sooner for sooner, later in pairwise(self.times) if later > begin and sooner < end]


def longest_gap(streams: Sequence[Arrivals], begin: float, end: float) -> float:
    """Of any stream within the span; infinite where nothing arrived at all."""
    return max((gap for one in streams for gap in one.gaps(begin, end)), default=float("inf"))


def median_gap(streams: Sequence[Arrivals], begin: float, end: float) -> float:
    """Of all streams within the span: the time of a step."""
    return statistics.median([gap for one in streams for gap in one.gaps(begin, end)] or [float("nan")])


@dataclass(frozen=True)
class Case:
    """A module, and the request that makes it migrate."""

    name: str
    module: Module
    request: dict[str, Any]
    max_steps: float


def cases_of(num_layers: int, num_kv_heads: int) -> list[Case]:
    """Each number of KV heads that can leave, and a third of the layers without and with their weights."""
    cases: list[Case] = []
    for count in range(1, num_kv_heads):
        heads = range(num_kv_heads - count, num_kv_heads)
        module, name = heads_of(0, num_layers, tuple(heads)), f"{count} of {num_kv_heads} KV heads"
        cases.append(Case(name, module, {"kv_heads": list(heads)}, MAX_STEPS_HEADS))
    first = num_layers - num_layers // 3
    for kind in ("offload", "migrate"):
        request = {"layers": [first, num_layers], "kind": kind}
        name = f"{num_layers - first} layers, {kind}"
        cases.append(Case(name, whole_layers(first, num_layers), request, MAX_STEPS_LAYERS))
    return cases


@dataclass(frozen=True)
class Watched:
    """One migration in one direction. Steps are medians, in seconds."""

    record: dict[str, Any]
    step_before: float
    step_during: float
    step_after: float
    longest_gap: float
    num_live_blocks: int
    """That the streams held when it began."""


@dataclass
class WatchedMesh:
    """One prefill and two decode workers with a coordinator that moves nothing by itself."""

    client: httpx.AsyncClient
    headers: dict[str, str]
    streams: list[Arrivals]
    num_prompt_tokens: int
    """Of each stream."""
    owner: Presence
    host: Presence

    async def migrate(self, request: dict[str, Any]) -> dict[str, Any]:
        """The record of the migration when it is over. Raises RuntimeError where it fails."""
        asked = {"instance": self.owner.incarnation, **request}
        if "return_of" not in request:
            asked["host"] = self.host.incarnation
        answer = await self.client.post("/v1/mesh/migrations", json=asked, headers=self.headers)
        if answer.status_code != 202:
            raise RuntimeError(f"{asked} was refused: {answer.text}")
        while True:
            record: dict[str, Any] = (await self.client.get(answer.headers["location"])).json()
            if record["is_over"]:
                break
            await asyncio.sleep(POLL_SECONDS)
        if record["phase"] != "done":
            raise RuntimeError(f"{record['what']} did not migrate: {record['error']}")
        return record

    async def watch(self, request: dict[str, Any], block_size: int) -> Watched:
        """Steps before, during and after a migration."""
        num_live_blocks = self.num_live_blocks(block_size)
        began = time.perf_counter()
        record = await self.migrate(request)
        ended = began + record["ended_unix_seconds"] - record["started_unix_seconds"] + AFTERMATH_SECONDS
        await asyncio.sleep(WATCH_SECONDS)
        now = time.perf_counter()
        return Watched(
            record,
            step_before=median_gap(self.streams, began - WATCH_SECONDS, began),
            step_during=median_gap(self.streams, began, ended),
            step_after=median_gap(self.streams, now - WATCH_SECONDS, now),
            longest_gap=longest_gap(self.streams, began, ended),
            num_live_blocks=num_live_blocks,
        )

    def num_live_blocks(self, block_size: int) -> int:
        """Blocks that the streams hold now."""
        return sum(-(-(self.num_prompt_tokens + len(one.times)) // block_size) for one in self.streams)


def measure_migration(say: Say) -> list[Figure]:
    """SmolLM2, a thread for each worker; about a minute."""
    return [figure for dtype in DTYPES for figure in asyncio.run(_measure(dtype, say))]


async def _measure(dtype: str, say: Say) -> list[Figure]:
    say(f"{dtype}: starting a mesh")
    async with watched_mesh("--dtype", dtype) as mesh:
        shape = shape_of(mesh.host)
        if shape is None:
            raise RuntimeError(f"{mesh.host.name} does not tell the shape of its model")
        say(f"{dtype}: steps without a migration")
        began = time.perf_counter()
        await asyncio.sleep(2 * WATCH_SECONDS)
        span = began, time.perf_counter()
        step = median_gap(mesh.streams, *span)
        figures = [
            Figure(f"{dtype}: step of {NUM_STREAMS} sequences, nothing away", step * 1e3, "ms"),
            _gap(f"{dtype}: longest gap without a migration", longest_gap(mesh.streams, *span), step),
        ]
        for case in cases_of(shape.num_layers, shape.num_kv_heads):
            say(f"{dtype}: {case.name}, away and back")
            away = await mesh.watch(case.request, shape.block_size)
            back = await mesh.watch({"return_of": away.record["id"]}, shape.block_size)
            figures += case_figures(f"{dtype}: {case.name}", case, shape, away, back)
    return figures


def case_figures(name: str, case: Case, shape: ModelShape, away: Watched, back: Watched) -> list[Figure]:
    """One module, away and back. Contexts grow meanwhile, so what a step takes longer is the step with the
    module away against those before it left and after it came back."""
    added = away.step_after - (away.step_before + back.step_after) / 2
    return [
        *_direction_figures(f"{name}, away", case, shape, away),
        Figure(f"{name}: added to each step", added * 1e3, "ms"),
        *_direction_figures(f"{name}, back", case, shape, back),
    ]


def _direction_figures(name: str, case: Case, shape: ModelShape, watched: Watched) -> list[Figure]:
    record, step = watched.record, watched.step_before
    held_mib = kv_bytes(shape, case.module, watched.num_live_blocks) / MIB
    copied = f"{name}: KV copied, {record['num_rounds']} rounds more"
    blocks = record["num_blocks_after"], record["num_blocks_before"]
    return [
        _gap(f"{name}: longest gap at clients", watched.longest_gap, step, case.max_steps),
        Figure(f"{name}: pause", record["pause_seconds"] * 1e3, "ms"),
        Figure(f"{name}: step meanwhile", watched.step_during * 1e3, "ms", step * 1e3, "step before"),
        Figure(f"{name}: weights", record["num_weight_bytes"] / MIB, "MiB"),
        Figure(copied, record["num_kv_bytes"] / MIB, "MiB", held_mib, "KV held at its begin"),
        Figure(f"{name}: KV blocks of the owner", blocks[0], "", blocks[1], "before"),
    ]


def _gap(name: str, seconds: float, step_seconds: float, max_steps: float | None = None) -> Figure:
    aim = None if max_steps is None else max_steps * step_seconds * 1e3
    return Figure(name, seconds * 1e3, "ms", step_seconds * 1e3, "step before", at_most=aim)


@asynccontextmanager
async def watched_mesh(*flags: str) -> AsyncGenerator[WatchedMesh]:
    """All streams run when it is entered, and are cut when it is left. A stream that ends before is an
    error."""
    admin_key = secrets.token_hex(16)
    with running_mesh(*MESH, "--admin-key", admin_key, *flags) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client, asyncio.TaskGroup() as group:
            streams = [Arrivals() for _ in range(NUM_STREAMS)]
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            bodies = [_body(model, number) for number in range(10, 10 + NUM_STREAMS)]
            once = await client.post("/v1/completions", json={**bodies[0], "max_tokens": 1})
            num_prompt_tokens = once.json()["usage"]["prompt_tokens"]
            tasks = [
                group.create_task(_stream(client, {**body, "stream": True}, stream))
                for body, stream in zip(bodies, streams, strict=True)
            ]
            owner, host = await _workers(client, lambda: all(len(one.times) > 1 for one in streams))
            headers = {"authorization": f"Bearer {admin_key}"}
            yield WatchedMesh(client, headers, streams, num_prompt_tokens, owner, host)
            for task in tasks:
                task.cancel()


def _body(model: str, number: int) -> dict[str, Any]:
    prompt = PROMPT.format(number=number)
    sampling = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return {"model": model, "prompt": prompt, **sampling}


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], arrivals: Arrivals) -> None:
    headers = {"x-session-id": SESSION}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for chunk in response.aiter_bytes():
            if b"data: {" in chunk:
                arrivals.times.append(time.perf_counter())
    raise RuntimeError(f"a stream ended after {len(arrivals.times)} tokens, while modules migrated")


async def _workers(client: httpx.AsyncClient, all_stream: Callable[[], bool]) -> tuple[Presence, Presence]:
    """The decode worker on which all streams run, and the other one, as soon as they do."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            services = (await client.get("/v1/mesh")).json()["services"]
            workers = [one for one in services if (one["kind"], one["state"]) == ("decode_worker", "ready")]
            workers.sort(key=lambda one: (one["load"] or {}).get("num_running", 0))
            num_running = (workers[-1]["load"] or {}).get("num_running") if workers else 0
            if len(workers) == 2 and num_running == NUM_STREAMS and all_stream():
                host, owner = (msgspec.convert(one, Presence) for one in workers)
                return owner, host
            await asyncio.sleep(POLL_SECONDS)
