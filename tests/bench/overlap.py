"""KV that arrives layer by layer while the rest of its prompt is computed: the engine against the formula.

The source is throttled by the clock: layer l is handed to the engine when l + 1 times the fetch of one layer
have passed. So what is measured is the engine's part: how well it computes what is there.
"""

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from libs.engine.engine import Engine
from libs.engine.outputs import LayerOutput, SequenceFailed, TokenOutput
from libs.engine.settings import EngineSettings
from libs.kv.names import block_names
from libs.model.load import find_model, load_model
from libs.model.model import Model
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from tests.bench.figures import Figure, Say
from tests.bench.mesh import random_prompt
from tests.bench.overlap_formula import overlapped_seconds

NUM_TOKENS = 2048
NUM_HELD_TOKENS = 1536
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
AIMED_RATIO = 0.5
MOST_EXCESS_PERCENT = 10.0
NUM_ROUNDS = 5


@dataclass
class Overlap:
    """TTFT of the whole prompt without a held prefix, of one whose prefix is there, and by ratio while it
    comes; the best of all rounds, since what disturbs a run only ever makes it slower."""

    num_layers: int
    recompute_seconds: float = math.inf
    here_seconds: dict[float, float] = field(default_factory=lambda: dict.fromkeys(RATIOS, math.inf))
    """By the ratio beside which it was measured, so that both sides are the best of as many runs."""
    fetch_seconds: dict[float, float] = field(default_factory=dict[float, float])
    """Of one layer, by ratio."""
    measured_seconds: dict[float, float] = field(default_factory=lambda: dict.fromkeys(RATIOS, math.inf))

    def predicted_seconds(self, ratio: float) -> float:
        """By the formula."""
        compute = self.here_seconds[ratio] / self.num_layers
        return overlapped_seconds(self.fetch_seconds[ratio], compute, self.num_layers)


class _FirstTokens:
    """An engine listener that drops the KV handed out and keeps when the prompt was done."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.done: asyncio.Future[float] | None = None

    def on_tokens(self, tokens: Sequence[TokenOutput]) -> None:
        raise RuntimeError("prompts end with their first token here")

    def on_layer(self, output: LayerOutput) -> None:
        self.engine.release_layer(output)

    def on_prompt_done(self, output: TokenOutput) -> None:
        if self.done is not None:
            self.done.set_result(time.perf_counter())

    def on_names(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Nobody asks what is held here."""

    def on_failed(self, failure: SequenceFailed) -> None:
        if self.done is not None:
            self.done.set_exception(RuntimeError(f"the engine failed: {failure}"))


class _Bench:
    """One engine that forgets, and the KV of one prompt."""

    def __init__(self, model: Model, prompt: list[int], num_threads: int) -> None:
        self.prompt = prompt
        self.settings = EngineSettings(num_blocks=512, max_model_len=4096, num_threads=num_threads)
        self.num_blocks = NUM_HELD_TOKENS // self.settings.block_size
        self.engine = Engine(model, self.settings)
        self.listener = _FirstTokens(self.engine)
        self.names = block_names(prompt, self.settings.block_size, model.fingerprint, "")[: self.num_blocks]
        self.layers: list[torch.Tensor] = []
        self.num_runs = 0

    async def ttft(self, *, num_held_tokens: int, fetch_seconds: float) -> float:
        """Seconds from the begin of fetch and prompt to its first token; a salt keeps each run from finding
        the one before."""
        self.num_runs += 1
        name, sampling = f"r{self.num_runs}", SamplingParams(temperature=0, max_tokens=1)
        generation = Generation(
            name,
            pack_token_ids(self.prompt),
            len(self.prompt),
            sampling,
            "",
            time.time() + 600,
            cache_salt=name if self.layers else "",
        )
        self.listener.done = asyncio.get_running_loop().create_future()
        await self.engine.reserve(generation, whole_prompt=True)
        if num_held_tokens and not fetch_seconds:
            await self.fetch(name, time.perf_counter(), 0.0)
        began = time.perf_counter()
        await self.engine.begin(name, num_computed_tokens=num_held_tokens, awaits_kv=True, hand_over=True)
        if num_held_tokens and fetch_seconds:
            await self.fetch(name, began, fetch_seconds)
        return await self.listener.done - began

    async def fetch(self, name: str, began: float, seconds_per_layer: float) -> None:
        for layer, blocks in enumerate(self.layers):
            await asyncio.sleep(began + (layer + 1) * seconds_per_layer - time.perf_counter())
            await self.engine.write_blocks(name, layer, 0, blocks)


async def measure(model: Model, *, num_threads: int, num_rounds: int) -> Overlap:
    """Every ratio once a round, each beside a run with the prefix there; these tell the compute per layer."""
    prompt = random_prompt(NUM_TOKENS, model.config.vocab_size, random.Random(3))
    bench, overlap = _Bench(model, prompt, num_threads), Overlap(model.config.num_layers)

    await bench.engine.start(bench.listener)
    try:
        await bench.ttft(num_held_tokens=0, fetch_seconds=0.0)
        bench.layers = list((await bench.engine.read_blocks(bench.names)).transpose(0, 1).contiguous())
        here = [
            await bench.ttft(num_held_tokens=NUM_HELD_TOKENS, fetch_seconds=0.0) for _ in range(num_rounds)
        ]
        compute = min(here) / overlap.num_layers
        overlap.fetch_seconds = {ratio: ratio * compute for ratio in RATIOS}
        for _ in range(num_rounds):
            seconds = await bench.ttft(num_held_tokens=0, fetch_seconds=0.0)
            overlap.recompute_seconds = min(overlap.recompute_seconds, seconds)
            for ratio, fetch in overlap.fetch_seconds.items():
                seconds = await bench.ttft(num_held_tokens=NUM_HELD_TOKENS, fetch_seconds=fetch)
                overlap.measured_seconds[ratio] = min(overlap.measured_seconds[ratio], seconds)
                seconds = await bench.ttft(num_held_tokens=NUM_HELD_TOKENS, fetch_seconds=0.0)
                overlap.here_seconds[ratio] = min(overlap.here_seconds[ratio], seconds)
    finally:
        await bench.engine.close()
    return overlap


def measure_overlap(say: Say) -> list[Figure]:
    """SmolLM2 in bf16, one thread: the event loop that fetches has the other core."""
    say(f"{NUM_HELD_TOKENS} of {NUM_TOKENS} tokens held: fetched layer by layer while the rest is computed")
    model = load_model(find_model("smollm2-135m-instruct"), dtype=torch.bfloat16)
    overlap = asyncio.run(measure(model, num_threads=1, num_rounds=NUM_ROUNDS))
    here_ms, recompute_ms = min(overlap.here_seconds.values()) * 1e3, overlap.recompute_seconds * 1e3
    figures = [Figure("TTFT, prefix there", here_ms, "ms", recompute_ms, "recomputed")]
    for ratio, measured in overlap.measured_seconds.items():
        figures += _against_formula(
            f"TTFT, fetch {ratio:g} x compute",
            measured,
            overlap.predicted_seconds(ratio),
            has_aim=ratio == AIMED_RATIO,
        )
    return figures


def _against_formula(name: str, measured: float, predicted: float, *, has_aim: bool) -> list[Figure]:
    excess = 100 * (measured / predicted - 1)
    aim = MOST_EXCESS_PERCENT if has_aim else None
    return [
        Figure(name, measured * 1e3, "ms", predicted * 1e3, "formula"),
        Figure(f"{name}: above the formula", excess, "%", at_most=aim),
    ]
