"""Engines that host: real threads, own sequences beside guests."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import torch
from engine_harness import Listener
from engine_moves import SIZE, core_of, drain, generation, model_of, prompt_of
from engine_moves import begin as begin_alone
from hosting_scene import Home

from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention
from libs.engine.engine import Engine, EngineSettings
from libs.engine.errors import EngineClosed, MoveRefused, NoRoom, NotYet
from libs.engine.hosting.calls import HostedCall, RunLayers, Settle
from libs.engine.hosting.port import Answer, HostLost
from libs.placement.module import heads_of, whole_layers

WAIT_SECONDS = 30.0
MAX_LEN = 256


@asynccontextmanager
async def host(
    listener: Listener | None = None,
    *,
    num_blocks: int = 160,
    share: float = 1.0,
    attention: ReferenceAttention | None = None,
) -> AsyncGenerator[Engine]:
    sizes = EngineSettings(
        max_model_len=MAX_LEN,
        num_blocks=num_blocks,
        block_size=SIZE,
        max_num_batched_tokens=64,
        device_share=share,
    )
    engine = Engine(model_of("gqa"), sizes, home="the-host", attention=attention)
    await engine.start(listener or Listener())
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield engine
    finally:
        await engine.close()


async def ask(engine: Engine, call: HostedCall, guest: str = "home") -> torch.Tensor:
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(done.set)

    answer = Answer(wake)
    engine.hosting.call(guest, call, answer)
    await done.wait()
    return answer.result()


async def run(engine: Engine, name: str, prompt: int, max_tokens: int) -> None:
    asked = generation(prompt_of(prompt, int(name[3:])), name, max_tokens=max_tokens)
    assert await engine.reserve(asked, whole_prompt=True) is not None
    await engine.begin(name, num_computed_tokens=0)


def alone(name: str, prompt: int, max_tokens: int) -> list[int]:
    core = core_of(model_of("gqa"), num_blocks=160)
    begin_alone(core, generation(prompt_of(prompt, int(name[3:])), name, max_tokens=max_tokens))
    return drain(core).tokens[name]


async def test_own_sequences_and_guests_run_side_by_side_and_neither_errs() -> None:
    heard, model = Listener(), model_of("gqa")
    home = Home(model, [[3, 1, 5, 6], [7, 2, 9, 4]], num_blocks=12)
    async with host(heard) as engine:
        granted = await engine.hosting.open(
            "home", "m", whole_layers(1, 3), num_blocks_wanted=12, num_blocks_least=12
        )
        assert granted == 12
        for number in range(3):
            await run(engine, f"own{number}", 23 + number, 100)
        num_steps = 0
        while len(heard.ids("own0")) < 100:
            if home.lens.max() >= 30:
                home.lens[:] = 0
            begun = home.step([2, 1])
            engine.hosting.call("home", begun, Answer(lambda: None))
            assert torch.equal(await ask(engine, RunLayers("m", home.hidden[1])), home.hidden[3])
            num_steps += 1
        assert num_steps > 3
        await heard.until(lambda: all(len(heard.ids(f"own{number}")) == 100 for number in range(3)))
        for number in range(3):
            assert heard.ids(f"own{number}") == alone(f"own{number}", 23 + number, 100)


async def test_memory_comes_back_when_a_module_a_guest_or_all_is_closed() -> None:
    async with host() as engine:
        hosting = engine.hosting
        for move_id in ("a", "b"):
            await hosting.open("home", move_id, whole_layers(0, 2), num_blocks_wanted=40, num_blocks_least=40)
        await hosting.open("other", "a", heads_of(0, 4, (1,)), num_blocks_wanted=30, num_blocks_least=1)
        assert [one.move_id for one in hosting.hosted()] == ["a", "b", "a"]
        assert engine.num_total_blocks == 160 - 20 - 20 - 10
        assert hosting.num_bytes == engine.load().num_hosted_bytes == 50 * 12 * 2 * SIZE * 16 * 4
        await hosting.close("home", "a")
        await hosting.close("home", "a")
        assert engine.num_total_blocks == 130
        await hosting.close_owner("home")
        await hosting.close_owner("nobody")
        assert engine.num_total_blocks == 150
        await hosting.close_owner("other")
        assert (engine.num_total_blocks, hosting.num_bytes) == (160, 0)


async def test_the_own_pool_always_holds_one_whole_sequence() -> None:
    async with host() as engine:
        granted = await engine.hosting.open(
            "home", "m", whole_layers(0, 2), num_blocks_wanted=10_000, num_blocks_least=1
        )
        assert engine.num_total_blocks == MAX_LEN // SIZE
        assert granted == 2 * (160 - MAX_LEN // SIZE)
        with pytest.raises(NoRoom):
            await engine.hosting.open(
                "home", "n", whole_layers(0, 1), num_blocks_wanted=5, num_blocks_least=1
            )
        with pytest.raises(MoveRefused):
            await engine.hosting.open(
                "home", "n", whole_layers(0, 9), num_blocks_wanted=5, num_blocks_least=1
            )


async def test_a_guest_gets_what_own_sequences_leave_and_preempts_none() -> None:
    heard = Listener()
    async with host(heard, num_blocks=MAX_LEN // SIZE) as engine:
        with pytest.raises(NoRoom):
            await engine.hosting.open(
                "home", "m", whole_layers(0, 2), num_blocks_wanted=9, num_blocks_least=1
            )
    heard = Listener()
    async with host(heard) as engine:
        for number in range(6):  # each of them holds 20 blocks, and goes on with 5 more
            await run(engine, f"own{number}", 159, 40)
        await heard.until(lambda: heard.ids("own5"))
        granted = await engine.hosting.open(
            "home", "m", whole_layers(0, 2), num_blocks_wanted=10_000, num_blocks_least=1
        )
        assert 0 < granted <= 2 * (160 - 6 * 20)
        await heard.until(lambda: all(len(heard.ids(f"own{number}")) == 40 for number in range(6)))
        for number in range(6):
            assert heard.ids(f"own{number}") == alone(f"own{number}", 159, 40)


async def test_a_closed_engine_answers_guests_that_it_is_gone() -> None:
    async with host() as engine:
        await engine.hosting.open("home", "m", whole_layers(0, 2), num_blocks_wanted=9, num_blocks_least=9)
        await engine.close()
        with pytest.raises(HostLost):
            await ask(engine, Settle())
        with pytest.raises(EngineClosed):
            await engine.hosting.close_owner("home")


async def test_a_command_that_must_wait_is_tried_again_after_steps() -> None:
    heard, tries = Listener(), list[int]()

    def act(core: object) -> str:
        tries.append(len(heard.steps))
        if len(tries) < 4:
            raise NotYet
        return "done"

    async with host(heard) as engine:
        waiting = asyncio.ensure_future(engine._ask(act))
        await run(engine, "own0", 10, 20)
        assert await waiting == "done"
        assert len(tries) == 4
        stuck = asyncio.ensure_future(engine._ask(raise_not_yet))
        await heard.until(lambda: len(heard.ids("own0")) == 20)
        await engine.close()
        with pytest.raises(EngineClosed):
            await stuck


async def test_a_command_that_waits_for_what_an_idle_step_does_is_not_slept_over() -> None:
    tries = list[int]()

    def act(core: object) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise NotYet
        return len(tries)

    async with host() as engine:
        assert await engine._ask(act) == 2


def raise_not_yet(core: object) -> None:
    raise NotYet


class SlowAttention(ReferenceAttention):
    """Each layer takes 2 ms or more."""

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        time.sleep(0.002)
        return super().attend(q, kv, batch, scale)


async def test_a_worker_with_a_share_of_the_device_does_no_more_than_its_share_of_the_work() -> None:
    heard = Listener()
    async with host(heard, share=0.1, attention=SlowAttention()) as engine:
        began = time.monotonic()
        await run(engine, "own0", 10, 200)  # 1.6 s of layers at least, on 0.25 s that are saved up
        while time.monotonic() < began + 2:
            heard.heard.clear()
            await heard.heard.wait()
            busy_seconds = (len(heard.steps) - 1) * 4 * 0.002
            assert busy_seconds <= 0.1 * (time.monotonic() - began) + 0.25
        assert 0 < len(heard.ids("own0")) < 100
        assert engine.load().busy_share > 0
        engine.abort("own0")


async def test_in_debt_kv_is_still_written_between_layers() -> None:
    heard = Listener()
    async with host(heard, share=0.05, attention=SlowAttention()) as engine:
        awaited = generation(prompt_of(20, 9), "awaits")
        assert await engine.reserve(awaited, whole_prompt=True) is not None
        await run(engine, "own0", 10, 200)
        await heard.until(lambda: len(heard.steps) > 32)  # the burst is used up: a step takes 0.16 s or more
        began, num_steps = time.monotonic(), len(heard.steps)
        for _ in range(50):
            assert await engine.write_blocks("awaits", 0, 0, torch.zeros(1, 3, 2, SIZE, 16))
        assert len(heard.steps) - num_steps <= 2 + (time.monotonic() - began) / 0.1
        assert len(heard.steps) - num_steps < 45  # fewer than writes
        engine.abort("own0")
        engine.abort("awaits")
