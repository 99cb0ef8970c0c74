"""Law 3: clients that go away leave nothing behind."""

import asyncio
import random

import pytest

from black_box import Mesh

pytestmark = pytest.mark.system
MESH = "double"

NUM_STREAMS = 200
AT_ONCE = 16


async def test_two_hundred_dropped_streams_leave_every_gauge_at_zero_and_the_next_answer_right(
    mesh: Mesh,
) -> None:
    question = "Name three fruits that grow on trees."
    client, random_moment, limit = mesh.async_client(), random.Random(20), asyncio.Semaphore(AT_ONCE)

    async def answer() -> str:
        reply = await client.completions.create(
            model=mesh.model, prompt=question, temperature=0, max_tokens=16
        )
        return reply.choices[0].text

    async def open_and_drop(i: int) -> None:
        async with limit:
            prompt = f"Story {i}: " + "the wind went on and on over the hills, " * random_moment.randrange(
                1, 12
            )
            try:
                # From "before the prompt is placed" to "in the middle of the answer".
                async with asyncio.timeout(random_moment.uniform(0.0, 0.6)):
                    stream = await client.completions.create(
                        model=mesh.model, prompt=prompt, max_tokens=200, stream=True
                    )
                    async for _ in stream:
                        pass
            except TimeoutError:
                return

    before = await answer()
    async with asyncio.TaskGroup() as group:
        for i in range(NUM_STREAMS):
            group.create_task(open_and_drop(i))
    await asyncio.to_thread(mesh.wait_idle)
    assert await answer() == before
    await client.close()
