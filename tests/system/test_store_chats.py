"""Many chats over two prefill and two decode workers, with memory for a fifth of their blocks: KV comes back
from memory and from disk, on any instance, and no answer differs from a cold run."""

import asyncio
from collections.abc import Callable

import openai
import pytest

from black_box import Mesh

pytestmark = pytest.mark.system
MESH = "chats"

NUM_CHATS, NUM_TURNS, ANSWER_TOKENS = 64, 3, 24
NUM_AT_ONCE = 8
TOPICS = ("rivers", "bridges", "clocks", "gardens", "winds", "letters", "ships", "bread")


def opening(chat: int) -> str:
    topic = TOPICS[chat % len(TOPICS)]
    rules = " ".join(f"Rule {n}: whatever is said of {topic} is said briefly and in order." for n in range(6))
    return f"{rules}\nGuest {chat}: tell me about {topic} number {chat}.\nHost:"


def next_turn(prompt: str, answer: str, turn: int) -> str:
    return f"{prompt}{answer}\nGuest: and what else, for the {turn + 1}. time?\nHost:"


async def ask_all(mesh: Mesh, prompts: list[str]) -> list[openai.types.Completion]:
    seats = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> openai.types.Completion:
        async with seats:
            return await client.completions.create(
                model=mesh.model,
                prompt=prompt,
                max_tokens=ANSWER_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )

    async with mesh.async_client() as client:
        return list(await asyncio.gather(*(ask(client, prompt) for prompt in prompts)))


def test_every_answer_of_many_chats_equals_a_cold_run_and_both_tiers_are_hit(
    mesh: Mesh, reference: Callable[[list[str], int], list[str]]
) -> None:
    prompts = [opening(guest) for guest in range(NUM_CHATS)]
    num_cached: list[int] = []
    for turn in range(NUM_TURNS):
        answers = asyncio.run(ask_all(mesh, prompts))
        texts = [answer.choices[0].text for answer in answers]
        assert texts == reference(prompts, ANSWER_TOKENS)
        details = [answer.usage.prompt_tokens_details for answer in answers if answer.usage]
        num_cached.append(sum((detail.cached_tokens or 0) for detail in details if detail))
        prompts = [next_turn(prompt, text, turn) for prompt, text in zip(prompts, texts, strict=True)]
    assert num_cached[1] > NUM_CHATS * 96, f"later turns find what earlier ones left: {num_cached}"
    assert num_cached[2] > num_cached[1], f"later turns find what earlier ones left: {num_cached}"
    hits = {tier: mesh.metric_sum("kvmesh_store_tier_hits_total", tier=tier) for tier in ("dram", "disk")}
    assert hits["dram"] > 0, hits
    assert hits["disk"] > 0, hits
    mesh.wait_idle()
