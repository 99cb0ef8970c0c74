"""Time to first token and inter-token latency of the mesh and of the engine alone, in one run."""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from libs.engine.engine import Engine
from libs.engine.settings import EngineSettings
from libs.model.load import find_model, load_model
from libs.model.model import Model
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from tests.bench.figures import Figure, Say
from tests.system.black_box import Mesh

NUM_STREAMS = 8
ANSWER_TOKENS = 64
NUM_PROMPTS = 12
PROMPT_TOKENS = (64, 512)
MODEL = "smollm2-135m-instruct"
MESH = ("--dtype", "bfloat16", "--threads", "1")


def measure_mesh(say: Say) -> list[Figure]:
    """HTTP, router, hand-over and bus on top of the engine, with the same threads per worker."""
    model = load_model(find_model(MODEL), dtype=torch.bfloat16)
    say("the engine alone, one thread")
    alone = asyncio.run(_measure_engine(model, PROMPT_TOKENS, num_threads=1))
    say("the mesh, one thread per worker")
    with running_mesh(*MESH) as url:
        meshed = asyncio.run(_measure_mesh(url, PROMPT_TOKENS, model.config.vocab_size))
    figures: list[Figure] = []
    for length in PROMPT_TOKENS:
        mesh_ms, alone_ms = meshed.ttft_seconds[length] * 1e3, alone.ttft_seconds[length] * 1e3
        figures += [
            Figure(f"TTFT, {length} tokens", mesh_ms, "ms", alone_ms, "engine alone"),
            Figure(f"TTFT, {length} tokens: added by the mesh", mesh_ms - alone_ms, "ms", at_most=10.0),
        ]
    mesh_ms, alone_ms = meshed.inter_token_seconds * 1e3, alone.inter_token_seconds * 1e3
    added = 100 * (mesh_ms / alone_ms - 1)
    return [
        *figures,
        Figure(f"inter-token latency, {NUM_STREAMS} streams", mesh_ms, "ms", alone_ms, "engine alone"),
        Figure("inter-token latency: added by the mesh", added, "%", at_most=10.0),
    ]


@dataclass(frozen=True)
class Latency:
    """Medians over the requests of one run."""

    ttft_seconds: dict[int, float]
    """By the number of prompt tokens, one request at a time, nothing cached."""
    inter_token_seconds: float
    """At NUM_STREAMS streams."""


def random_prompt(num_tokens: int, vocab_size: int, source: random.Random) -> list[int]:
    """A prompt that no cache has seen; ids below 1000 are left out, since special tokens live there."""
    return [source.randrange(1000, vocab_size) for _ in range(num_tokens)]


@dataclass
class _Stopwatch:
    """An engine listener that keeps the arrival time of every token."""

    arrivals: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    num_open: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def on_tokens(self, tokens: Sequence[Any]) -> None:
        now = time.perf_counter()
        for token in tokens:
            self.arrivals[token.sequence_id].append(now)
            self.num_open -= token.finish is not None
        if not self.num_open:
            self.idle.set()

    def on_layer(self, output: Any) -> None:
        raise RuntimeError("nothing is handed over here")

    def on_prompt_done(self, output: Any) -> None:
        raise RuntimeError("nothing is handed over here")

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Nobody asks what is held here."""

    def on_failed(self, failure: Any) -> None:
        raise RuntimeError(f"the engine failed: {failure}")


async def _measure_engine(model: Model, prompt_lengths: Sequence[int], *, num_threads: int) -> Latency:
    """The engine with prompts and decode in one process, no bus, no HTTP."""
    watch, source = _Stopwatch(), random.Random(1)
    settings = EngineSettings(num_blocks=1024, max_model_len=2048, num_threads=num_threads)
    engine = Engine(model, settings)
    await engine.start(watch)

    async def run(name: str, prompts: list[list[int]], max_tokens: int) -> dict[str, list[float]]:
        begins = {f"{name}-{i}": time.perf_counter() for i in range(len(prompts))}
        watch.arrivals = {key: [begin] for key, begin in begins.items()}
        watch.num_open, watch.idle = len(prompts), asyncio.Event()
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for key, prompt in zip(begins, prompts, strict=True):
            generation = Generation(key, pack_token_ids(prompt), len(prompt), sampling, "", time.time() + 600)
            await engine.reserve(generation, whole_prompt=True)
            await engine.begin(key, num_computed_tokens=0)
        await watch.idle.wait()
        return watch.arrivals

    ttft: dict[int, float] = {}
    for length in prompt_lengths:
        waits: list[float] = []
        for i in range(NUM_PROMPTS):
            prompt = random_prompt(length, model.config.vocab_size, source)
            (times,) = (await run(f"{length}-{i}", [prompt], 1)).values()
            waits.append(times[1] - times[0])
        ttft[length] = statistics.median(waits[2:])
    prompts = [random_prompt(32, model.config.vocab_size, source) for _ in range(NUM_STREAMS)]
    arrivals = await run("streams", prompts, ANSWER_TOKENS)
    await engine.close()
    return Latency(ttft, _median_gap([times[1:] for times in arrivals.values()]))


def _median_gap(arrivals: list[list[float]]) -> float:
    """Over the time in which all streams run: from the last first token to the first last one."""
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    spans = [[t for t in times if begin <= t <= end] for times in arrivals]
    return statistics.median((span[-1] - span[0]) / (len(span) - 1) for span in spans if len(span) > 1)


@contextmanager
def running_mesh(*flags: str) -> Generator[str]:
    """`up` on a free port, as the tests start it; yields its address; gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder, ExitStack() as stack:
        mesh = Mesh(Path(folder), *flags)
        stack.callback(mesh.stop)
        mesh.wait_ready()
        yield mesh.url


async def _stream(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> list[float]:
    """Times of the request and of every token's arrival."""
    body = {
        "model": (await client.get("/v1/models")).json()["data"][0]["id"],
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
    }
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            # A chunk carries the tokens of one step, so chunks are counted, not tokens.
            times += [time.perf_counter()] * _has_text(line)
    return times


def _has_text(line: str) -> bool:
    return line.startswith("data: {") and bool(json.loads(line[6:])["choices"])


async def _measure_mesh(url: str, prompt_lengths: Sequence[int], vocab_size: int) -> Latency:
    """The same kind of prompts through HTTP, router, prefill and decode worker."""
    source = random.Random(2)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        ttft: dict[int, float] = {}
        for length in prompt_lengths:
            waits: list[float] = []
            for _ in range(NUM_PROMPTS):
                times = await _stream(client, random_prompt(length, vocab_size, source), 1)
                waits.append(times[1] - times[0])
            ttft[length] = statistics.median(waits[2:])
        prompts = [random_prompt(32, vocab_size, source) for _ in range(NUM_STREAMS)]
        arrivals = await asyncio.gather(*(_stream(client, prompt, ANSWER_TOKENS) for prompt in prompts))
        return Latency(ttft, _median_gap([times[1:] for times in arrivals]))
