"""Law 2: prefill here and decode there gives the very tokens of a single process."""

import asyncio
from collections.abc import Callable

import openai
import pytest

from black_box import SMOLLM2, Mesh

pytestmark = pytest.mark.system
MESH = "smollm2"

NUM_PROMPTS = 50
MAX_TOKENS = 16
SENTENCES = [
    "The mesh carries prompts to one worker and answers from another.",
    "In the year 1887 a clockmaker from Basel built a machine that counted raindrops.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Die Brücke über den Fluss ist lang, schmal und sehr alt.",
    "Prices rose by 3.7 % in March, by 2.9 % in April, and fell in May.",
    "She asked whether the night train still stops at the village by the lake.",
]


def _prompts() -> list[str]:
    """From one sentence to about 900 tokens: below a block, over a block border, over several chunks."""
    prompts: list[str] = []
    for i in range(NUM_PROMPTS):
        num_sentences = 1 + i**3 // 2800
        prompts.append(f"{i}. " + " ".join(SENTENCES[(i + k) % len(SENTENCES)] for k in range(num_sentences)))
    return prompts


@pytest.fixture(scope="module")
def expected(reference: Callable[[list[str], int], list[str]]) -> list[str]:
    """The same prompts through one engine in this process: no bus, no Link, no chunks of another size."""
    return reference(_prompts(), MAX_TOKENS)


def _complete(client: openai.OpenAI, prompt: str) -> str:
    answer = client.completions.create(
        model=SMOLLM2, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def test_prompts_one_by_one(mesh: Mesh, expected: list[str]) -> None:
    client = mesh.client()
    assert [_complete(client, prompt) for prompt in _prompts()[::3]] == expected[::3]


async def test_fifty_prompts_sixteen_at_once(mesh: Mesh, expected: list[str]) -> None:
    client, limit = mesh.async_client(), asyncio.Semaphore(16)

    async def complete(prompt: str) -> str:
        async with limit:
            answer = await client.completions.create(
                model=SMOLLM2,
                prompt=prompt,
                temperature=0,
                max_tokens=MAX_TOKENS,
                extra_body={"ignore_eos": True},
            )
            return answer.choices[0].text

    assert list(await asyncio.gather(*(complete(prompt) for prompt in _prompts()))) == expected
    await client.close()
