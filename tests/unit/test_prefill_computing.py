"""Prompts wait for blocks in order of arrival, and do not wait for each other where there is room."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from libs.bus.messages.generation import Prefill
from libs.engine.outputs import Reservation
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from libs.telemetry.traces import start_span
from services.prefill_worker.computing import Computing
from services.prefill_worker.prompts import Prompt

BLOCK = 16


class ReservingEngine:
    """As the engine does: answers what it was asked between its steps, in the order it was asked in."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.begun: list[str] = []
        self._waiting: list[tuple[Generation, asyncio.Future[Reservation | None]]] = []

    async def reserve(
        self, generation: Generation, *, sequence_id: str, whole_prompt: bool
    ) -> Reservation | None:
        assert whole_prompt
        assert sequence_id == generation.request_id
        answer: asyncio.Future[Reservation | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((generation, answer))
        return await answer

    async def begin(self, sequence_id: str, **_: object) -> None:
        self.begun.append(sequence_id)

    def step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for generation, answer in waiting:
            num_blocks = -(-generation.num_prompt_tokens // BLOCK)
            fits = num_blocks <= self.num_free
            self.num_free -= num_blocks * fits
            answer.set_result(Reservation(generation.request_id, num_blocks, 0) if fits else None)


def prompt_of(name: str, num_blocks: int) -> Prompt:
    num_tokens = num_blocks * BLOCK
    ids = pack_token_ids(list(range(num_tokens)))
    generation = Generation(name, ids, num_tokens, SamplingParams(), "gateway", 2e9)
    request = Prefill(generation=generation, decode="d", link_address="", first_block=0)
    return Prompt(request, 0.0, start_span("prefill", "", request_id=name))


def computing_on(engine: ReservingEngine) -> Computing:
    untouched = cast("Any", None)  # nothing here has a prefix or is put
    return Computing(cast("Any", engine), untouched, untouched, block_size=BLOCK)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Tasks:
    """Runs prompts until the test is over."""

    def __init__(self) -> None:
        self.all: list[asyncio.Task[None]] = []

    def run(self, computing: Computing, prompt: Prompt) -> asyncio.Task[None]:
        self.all.append(asyncio.create_task(computing.run(prompt)))
        return self.all[-1]


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks()
    yield tasks
    for task in tasks.all:
        task.cancel()
    await asyncio.gather(*tasks.all, return_exceptions=True)


async def test_prompts_that_come_during_a_step_are_all_in_the_next_one(tasks: Tasks) -> None:
    engine = ReservingEngine(num_free=100)
    computing = computing_on(engine)
    names = [f"p{number}" for number in range(12)]
    for name in names:
        tasks.run(computing, prompt_of(name, 2))
    await settle()
    engine.step()
    await settle()
    assert engine.begun == names


async def test_who_comes_later_does_not_overtake_one_that_waits_for_room(tasks: Tasks) -> None:
    engine = ReservingEngine(num_free=4)
    computing = computing_on(engine)
    tasks.run(computing, prompt_of("long", 8))
    await settle()
    engine.step()  # no room
    await settle()
    tasks.run(computing, prompt_of("short", 1))
    await settle()
    engine.step()
    await settle()
    assert engine.begun == [], "there is room for the short one, which waits behind the long one"
    engine.num_free = 9
    computing.room_came()
    for _ in range(3):
        await settle()
        engine.step()
    await settle()
    assert engine.begun == ["long", "short"]


async def test_a_prompt_that_ends_while_it_is_in_line_makes_way(tasks: Tasks) -> None:
    engine = ReservingEngine(num_free=4)
    computing = computing_on(engine)
    waiting = tasks.run(computing, prompt_of("long", 8))
    await settle()
    engine.step()
    await settle()
    engine.step()
    await settle()
    waiting.cancel()
    await settle()
    tasks.run(computing, prompt_of("short", 1))
    await settle()
    engine.step()
    await settle()
    assert engine.begun == ["short"]
