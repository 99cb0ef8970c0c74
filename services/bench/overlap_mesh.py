"""The same overlap through HTTP, a real store whose sending is throttled, and Links.

The prefill worker's pool holds hardly more than one prompt, so that another one in between drives the prefix
out: then it comes from the store. The decode worker keeps the prefix all the time, so that the same is handed
over in both cases.
"""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from libs.cost.overlap import overlapped_seconds
from services.bench.mesh_overhead import random_prompt, running_mesh

NUM_SPARE_BLOCKS = 3


@dataclass(frozen=True)
class Prompts:
    """What is asked: a prefix that is held, and new tokens behind it."""

    num_tokens: int
    num_held_tokens: int
    vocab_size: int
    block_size: int
    layer_block_bytes: int
    """One block of one layer."""
    num_layers: int


@dataclass
class MeshOverlap:
    """Runs of one throttle: with the prefix here, and with it at the store."""

    fetch_seconds_per_layer: float
    num_layers: int
    here_seconds: list[float] = field(default_factory=list[float])
    fetched_seconds: list[float] = field(default_factory=list[float])
    num_cached_tokens: list[int] = field(default_factory=list[int])
    """Of the runs with the prefix at the store; fewer than are held where a part was computed instead."""

    def predicted_seconds(self) -> float:
        """By the formula, where the best run with the prefix here tells the compute."""
        compute = min(self.here_seconds) / self.num_layers
        return overlapped_seconds(self.fetch_seconds_per_layer, compute, self.num_layers)


async def measure_mesh_overlap(prompts: Prompts, fetch_seconds: float, num_rounds: int) -> MeshOverlap:
    """A mesh whose store sends one layer of the held prefix in `fetch_seconds`; one prompt at a time."""
    held_blocks = prompts.num_held_tokens // prompts.block_size
    rate = held_blocks * prompts.layer_block_bytes / fetch_seconds
    num_blocks = prompts.num_tokens // prompts.block_size + 1 + NUM_SPARE_BLOCKS
    source = random.Random(4)
    prefix = random_prompt(prompts.num_held_tokens, prompts.vocab_size, source)

    def prompt(begin: list[int]) -> list[int]:
        return begin + random_prompt(prompts.num_tokens - len(begin), prompts.vocab_size, source)

    overlap = MeshOverlap(fetch_seconds, prompts.num_layers)
    flags = ("--dtype", "bfloat16", "--threads", "1", "--fetch-bytes-per-second", f"{rate:.0f}")
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(f"[prefill_worker]\nnum_blocks = {num_blocks}\n")
        config.flush()
        with running_mesh(*flags, "--config", config.name) as url:
            await _run(overlap, url, prompt, prefix, num_rounds)
    return overlap


async def _run(
    overlap: MeshOverlap,
    url: str,
    prompt: Callable[[list[int]], list[int]],
    prefix: list[int],
    num_rounds: int,
) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await _first_token(client, model, prompt(prefix))
        for number in range(num_rounds + 1):
            await _first_token(client, model, prompt([]))
            fetched, num_cached = await _first_token(client, model, prompt(prefix))
            here, _ = await _first_token(client, model, prompt(prefix))
            if number:  # the first one teaches the mesh what fetching and computing cost
                overlap.fetched_seconds.append(fetched)
                overlap.here_seconds.append(here)
                overlap.num_cached_tokens.append(num_cached)


async def _first_token(client: httpx.AsyncClient, model: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds until it is there, and how many tokens of the prompt were not computed."""
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 1, "ignore_eos": True}
    began = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    seconds = time.perf_counter() - began
    response.raise_for_status()
    return seconds, response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
