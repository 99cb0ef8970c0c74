"""kill -9 under load: each stream ends in the right text or one error event, and the mesh heals by itself."""

import asyncio
from collections.abc import Callable

import openai
import pytest

from black_box import Mesh

pytestmark = pytest.mark.system
MESH = "double"

NUM_STREAMS = 16
MAX_TOKENS = 48
DEADLINE_SECONDS = 90.0


def _prompt(i: int) -> str:
    return f"Letter {i}. Dear friend, " + "today I walked along the river and saw many birds. " * (1 + i % 5)


async def _stream(
    client: openai.AsyncOpenAI, model: str, prompt: str, begun: asyncio.Event | None = None
) -> str | None:
    """The whole text, or None where the stream ended in an error event."""
    text = ""
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            if begun and text:
                begun.set()
    except openai.APIError:
        return None
    return text


@pytest.fixture(scope="module")
def expected(reference: Callable[[list[str], int], list[str]]) -> list[str]:
    return reference([_prompt(i) for i in range(NUM_STREAMS)], MAX_TOKENS)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_streams_survive_the_death_of_a_worker(mesh: Mesh, expected: list[str], victim: str) -> None:
    client = mesh.async_client()
    begun = asyncio.Event()
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as group:
        streams = [
            group.create_task(_stream(client, mesh.model, _prompt(i), begun)) for i in range(NUM_STREAMS)
        ]
        await begun.wait()
        dead = await asyncio.to_thread(mesh.kill, victim)
    texts = [stream.result() for stream in streams]
    wrong = [i for i, text in enumerate(texts) if text is not None and text != expected[i]]
    assert not wrong, [(expected[i], texts[i]) for i in wrong]
    assert texts.count(None) <= NUM_STREAMS // 4, "replay saves nearly every stream"
    await asyncio.to_thread(mesh.wait_restarted, victim, dead)
    await asyncio.to_thread(mesh.wait_idle)
    others = {s["name"]: s["incarnation"] for s in mesh.services() if s["name"] != victim}
    again = await asyncio.gather(*(_stream(client, mesh.model, _prompt(i)) for i in range(NUM_STREAMS)))
    assert again == expected
    assert {s["name"]: s["incarnation"] for s in mesh.services() if s["name"] != victim} == others
    await client.close()
