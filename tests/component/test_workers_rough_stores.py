"""Many prompts that share prefixes, over stores that lose, corrupt, hold back and die: every answer is right,
and nothing stays."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tampered_links import tampering
from workers_gateway import Gateway, Stream
from workers_mesh import Hosted, WorkersMesh, prompt_of, running_mesh
from workers_reference import Reference

from libs.transport.frames import Fetched, FetchMissed, FrameHeader, PutLayer
from libs.transport.port import Bytes
from libs.worker.stores import circuit_breaker

NUM_PROMPTS, NUM_AT_ONCE = 90, 8
MAX_TOKENS = 12
NUM_BETWEEN_RESTARTS = 12
"""Prompts that end while both stores are there: by the clock, a busy machine would lose all that stores hold
before anybody asks for it."""
pytestmark = pytest.mark.usefixtures("layer_by_layer")


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def little_is_held_against_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that failed is asked again by the next prompts, or few would ever come to a rough fetch."""
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_SECONDS", 0.02)


class Rough:
    """What a Link does to frames of KV, by chance."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def tamper(self, header: FrameHeader, body: Bytes | None) -> Any:
        if not isinstance(header, Fetched | FetchMissed | PutLayer):
            return True
        draw = self._chance.random()
        if draw < 0.03 and body is not None and body.size:
            body[self._chance.randrange(body.size)] ^= 1 << self._chance.randrange(8)
        elif draw < 0.05 and isinstance(header, Fetched):
            return False
        elif draw < 0.2:
            return asyncio.sleep(self._chance.random() * 0.05)
        return True


def prompts(chance: random.Random) -> list[list[int]]:
    """Turns of a few chats: each begins with what some other began with."""
    roots = [prompt_of(140, seed=seed) for seed in range(4)]
    return [
        chance.choice(roots)[: chance.choice((60, 140))] + prompt_of(chance.randrange(1, 60), seed=number)
        for number in range(NUM_PROMPTS)
    ]


async def start(mesh: WorkersMesh, rough: Rough) -> list[Hosted]:
    for name in ("store-0", "store-1"):
        await mesh.store(name, wrap=tampering(rough.tamper))
    hurried = {"store_fetch_timeout_seconds": 1.0}
    workers = [
        await mesh.prefill(f"prefill-{n}", wrap=tampering(rough.tamper), num_blocks=100, **hurried)
        for n in range(2)
    ]
    for number in range(2):
        await mesh.decode(f"decode-{number}", num_blocks=600, store_finished=True, **hurried)
    return workers


async def ask(gateway: Gateway, mesh: WorkersMesh, prompt: list[int], chance: random.Random) -> Stream | None:
    """None: aborted on the way."""
    prefill, decode = chance.choice(("prefill-0", "prefill-1")), chance.choice(("decode-0", "decode-1"))
    where = {"prefill": mesh.hosted[prefill].incarnation, "decode": mesh.hosted[decode].incarnation}
    stream = await gateway.begin(gateway.generation(prompt, max_tokens=MAX_TOKENS), **where)
    if chance.random() < 0.15:
        await asyncio.sleep(chance.random() * 0.05)
        await gateway.abort(stream)
        return None
    return await stream.end()


async def restart_stores(
    mesh: WorkersMesh, rough: Rough, chance: random.Random, ended: asyncio.Semaphore
) -> None:
    while True:
        while not ended.locked():
            await ended.acquire()
        for _ in range(NUM_BETWEEN_RESTARTS):
            await ended.acquire()
        name = chance.choice(("store-0", "store-1"))
        await mesh.kill(mesh.hosted[name])
        await asyncio.sleep(0.1)
        await mesh.store(name, wrap=tampering(rough.tamper))


async def test_answers_are_right_whatever_stores_and_their_links_do(mesh: WorkersMesh) -> None:
    chance = random.Random(0)
    rough = Rough(chance)
    gateway = await mesh.gateway()
    workers = await start(mesh, rough)
    wanted = prompts(chance)
    seats, ended = asyncio.Semaphore(NUM_AT_ONCE), asyncio.Semaphore(0)

    async def one(prompt: list[int]) -> Stream | None:
        async with seats:
            answer = await ask(gateway, mesh, prompt, chance)
        ended.release()
        return answer

    restarting = asyncio.create_task(restart_stores(mesh, rough, chance, ended))
    async with asyncio.timeout(120):
        answers = await asyncio.gather(*(one(prompt) for prompt in wanted))
    restarting.cancel()
    await asyncio.gather(restarting, return_exceptions=True)
    async with Reference() as reference:
        for answer in filter(None, answers):
            expected = await reference.tokens(answer.generation)
            assert answer.failure is None
            assert answer.tokens == [token.token_id for token in expected]
    results = ("hit", "failed", "corrupt", "missed", "none", "unwanted")
    counts = {r: sum(w.gauge("kvmesh_store_lookups_total", result=r) for w in workers) for r in results}
    assert counts["hit"] > 0, counts
    assert counts["failed"] + counts["corrupt"] + counts["missed"] > 0, counts
    await mesh.until_idle()
