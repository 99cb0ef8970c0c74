"""What an engine's thread does while a host lets it wait."""

import asyncio
from collections.abc import Callable

import torch
from engine_harness import Listener
from engine_moves import SIZE, generation, model_of, prompt_of
from memory_host import MemoryHost

from libs.engine.engine import Engine, EngineSettings
from libs.engine.hosting.calls import ANSWERED, HostedCall, ReadBlocks, Settle
from libs.engine.hosting.port import Answer
from libs.placement.module import heads_of
from libs.placement.placement import PlacedModule

MODULE = heads_of(0, 4, (1,))


class Stalling:
    """A host that, while it stalls, neither takes calls in nor reads blocks for anyone."""

    def __init__(self, inner: MemoryHost, wake: Callable[[], None]) -> None:
        self.inner, self.worker, self.wake = inner, inner.worker, wake
        self.loop = asyncio.get_running_loop()
        self.stalls = False
        self.has_stalled = asyncio.Event()
        self.kept: list[tuple[Answer, HostedCall]] = []

    def call(self, call: HostedCall) -> Answer:
        if not self.stalls or (isinstance(call, ANSWERED) and not isinstance(call, ReadBlocks)):
            return self.inner.call(call)
        answer = Answer(self.wake)
        self.kept.append((answer, call))
        self.loop.call_soon_threadsafe(self.has_stalled.set)
        return answer

    def go_on(self) -> None:
        self.stalls = False
        for answer, call in self.kept:
            done = self.inner.call(call)
            answer.give(done.result() if done.is_done else torch.zeros(0))


class Pair:
    """A home with a module at a stalling host, and a guest of its own."""

    def __init__(self) -> None:
        sizes = EngineSettings(max_model_len=256, num_blocks=160, block_size=SIZE, max_num_batched_tokens=64)
        self.heard = Listener()
        self.home = Engine(model_of("gqa"), sizes, home="home")
        self.other = Engine(model_of("gqa"), sizes, home="other")

    async def open(self) -> Stalling:
        await self.home.start(self.heard)
        await self.other.start(Listener())
        await self.home.hosting.open("guest", "g", MODULE, num_blocks_wanted=9, num_blocks_least=9)
        granted = await self.other.hosting.open(
            "home", "m", MODULE, num_blocks_wanted=300, num_blocks_least=40
        )
        placed = PlacedModule(move_id="m", module=MODULE, worker="other", num_blocks=granted)
        inner = MemoryHost("other", "home", self.other.hosting.call, self.home.wake)
        host = Stalling(inner, self.home.wake)
        await self.home.migrations.begin_move(placed, host)
        await self.home.migrations.switch("m")
        return host

    async def close(self) -> None:
        await self.home.close()
        await self.other.close()

    async def run_guest(self) -> None:
        """Returns when a piece of the guest's work was done."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(done.set)

        answer = Answer(wake)
        self.home.hosting.call("guest", Settle(), answer)
        await done.wait()
        answer.result()


async def test_any_number_of_writes_wait_for_a_host_that_takes_nothing_in() -> None:
    pair = Pair()
    try:
        async with asyncio.timeout(30):
            host = await pair.open()
            for one in range(2):
                awaited = generation(prompt_of(200, one), f"s{one}")
                assert await pair.home.reserve(awaited, whole_prompt=True) is not None
            kv = torch.zeros((1, 3, 2, SIZE, 16))
            host.stalls = True
            writes = list[asyncio.Task[bool]]()
            for number in range(160):
                sequence, layer, block = f"s{number % 2}", number // 2 % 4, number // 8
                writes.append(asyncio.create_task(pair.home.write_blocks(sequence, layer, block, kv)))
                await host.has_stalled.wait()
                await pair.run_guest()
            host.go_on()
            assert all(await asyncio.gather(*writes))
    finally:
        await pair.close()


async def test_a_piece_on_its_way_home_is_taken_however_busy_guests_are() -> None:
    pair = Pair()
    try:
        async with asyncio.timeout(30):
            host = await pair.open()
            asked = generation(prompt_of(40), "own", max_tokens=4)
            assert await pair.home.reserve(asked, whole_prompt=True) is not None
            await pair.home.begin("own", num_computed_tokens=0)
            await pair.heard.until(lambda: len(pair.heard.ids("own")) == 4)
            await pair.home.migrations.begin_return("m")
            host.stalls = True
            copying = asyncio.create_task(pair.home.migrations.copy_some("m", 1 << 20))
            await host.has_stalled.wait()
            for _ in range(5):
                await pair.run_guest()
            (answer, call), host.stalls = host.kept.pop(), False
            assert isinstance(call, ReadBlocks)
            answer.give(torch.zeros(len(call.blocks), 4, 2, SIZE, 16))
            async with asyncio.timeout(20):
                assert (await copying).num_left_blocks == 0
    finally:
        await pair.close()
