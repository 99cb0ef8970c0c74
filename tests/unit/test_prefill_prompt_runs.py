"""Prompts wait for blocks in order of arrival, and do not wait for each other where there is room."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, cast

import pytest

from libs.engine.outputs import Reservation
from libs.request.generation import Generation, pack_token_ids
from libs.request.sampling import SamplingParams
from libs.worker.prefill.block_queue import BlockQueue
from libs.worker.prefill.prompt import Prompt
from libs.worker.prefill.prompt_runs import PromptRuns

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
    return Prompt(generation)


def runs_on(engine: ReservingEngine) -> "Runs":
    untouched = cast("Any", None)  # nothing here has a prefix or is put
    blocks = BlockQueue(cast("Any", engine))
    runs = PromptRuns(cast("Any", engine), blocks, untouched, untouched, untouched, block_size=BLOCK)
    return Runs(runs, blocks)


class Runs(NamedTuple):
    all: PromptRuns
    blocks: BlockQueue


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Tasks:
    """Runs prompts until the test is over."""

    def __init__(self) -> None:
        self.all: list[asyncio.Task[None]] = []

    def run(self, runs: Runs, prompt: Prompt) -> asyncio.Task[None]:
        self.all.append(asyncio.create_task(runs.all.run(prompt)))
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
    runs = runs_on(engine)
    names = [f"p{number}" for number in range(12)]
    for name in names:
        tasks.run(runs, prompt_of(name, 2))
    await settle()
    engine.step()
    await settle()
    assert engine.begun == names


async def test_who_comes_later_does_not_overtake_one_that_waits_for_room(tasks: Tasks) -> None:
    engine = ReservingEngine(num_free=4)
    runs = runs_on(engine)
    tasks.run(runs, prompt_of("long", 8))
    await settle()
    engine.step()  # no room
    await settle()
    tasks.run(runs, prompt_of("short", 1))
    await settle()
    engine.step()
    await settle()
    assert engine.begun == [], "there is room for the short one, which waits behind the long one"
    engine.num_free = 9
    runs.blocks.freed()
    for _ in range(3):
        await settle()
        engine.step()
    await settle()
    assert engine.begun == ["long", "short"]


async def test_a_prompt_that_ends_while_it_is_in_line_makes_way(tasks: Tasks) -> None:
    engine = ReservingEngine(num_free=4)
    runs = runs_on(engine)
    waiting = tasks.run(runs, prompt_of("long", 8))
    await settle()
    engine.step()
    await settle()
    engine.step()
    await settle()
    waiting.cancel()
    await settle()
    tasks.run(runs, prompt_of("short", 1))
    await settle()
    engine.step()
    await settle()
    assert engine.begun == ["short"]
