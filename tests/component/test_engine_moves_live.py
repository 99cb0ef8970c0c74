"""Two engines with threads of their own: modules of one move to the other and back while both serve."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
from call_links_scene import call_links
from engine_harness import Listener
from engine_moves import SIZE, core_of, drain, generation, model_of, prompt_of
from engine_moves import begin as begin_alone
from memory_host import MemoryHost
from msgspec.structs import replace

from libs.engine.engine import Engine, EngineSettings
from libs.engine.errors import EngineDied, MoveRefused, WeightsLost
from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.port import Answer, Host
from libs.engine.outputs import Switched
from libs.model.model import Model
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import PlacedModule
from libs.request.generation import Generation
from libs.request.outcome import FailureReason
from libs.transport.choose import TransportKind
from libs.worker.migration.call_links import CallLinks


class Pair:
    """Each hosts for the other; calls go through `links`, by name, or where there are none stay in memory."""

    def __init__(self, model: Model, timeout_seconds: float = 30.0) -> None:
        self.links: dict[str, CallLinks] = {}
        self.model = model
        sizes = EngineSettings(
            max_model_len=256,
            num_blocks=160,
            block_size=SIZE,
            max_num_batched_tokens=64,
            hosting_timeout_seconds=timeout_seconds,
        )
        self.heard = {name: Listener() for name in "ab"}
        self.engines = {name: Engine(self.model, sizes, home=name) for name in "ab"}

    async def run(self, name: str, asked: Generation) -> None:
        assert await self.engines[name].reserve(asked, whole_prompt=True) is not None
        await self.engines[name].begin(asked.request_id, num_computed_tokens=0)

    async def begin(
        self,
        home: str,
        worker: str,
        module: Module,
        move_id: str,
        *,
        lent: int = 20,
        model_after: Model | None = None,
    ) -> None:
        """Weights travel where there is a `model_after`."""
        engine, host = self.engines[home], self.engines[worker]
        has_weights_at_owner = model_after is None
        placed = PlacedModule(
            move_id=move_id, module=module, worker=worker, has_weights_at_owner=has_weights_at_owner
        )
        wanted = await engine.migrations.capacity_with(placed) if module != remote_blocks(4) else lent
        granted = await host.hosting.open(
            home, move_id, module, num_blocks_wanted=wanted, num_blocks_least=lent
        )
        placed = replace(placed, num_blocks=granted)
        way: Host = MemoryHost(worker, home, host.hosting.call, engine.wake)
        if self.links:
            address = self.links[worker].address
            way = await self.links[home].connect(worker, address, lambda calls, why: None)
        await engine.migrations.begin_move(placed, way, model_after=model_after)

    async def copy(self, home: str, move_id: str) -> Switched:
        engine = self.engines[home]
        while (await engine.migrations.copy_some(move_id, 20_000)).num_left_blocks > 4:
            pass
        return await engine.migrations.switch(move_id)

    async def away(self, home: str, worker: str, module: Module, move_id: str) -> Switched:
        await self.begin(home, worker, module, move_id)
        return await self.copy(home, move_id)

    async def back(self, home: str, worker: str, move_id: str) -> Switched:
        await self.engines[home].migrations.begin_return(move_id)
        switched = await self.copy(home, move_id)
        await self.engines[worker].hosting.close(home, move_id)
        return switched


def has_heard(heard: Listener, num_tokens: int) -> bool:
    return sum(len(step) for step in heard.steps) == num_tokens


@asynccontextmanager
async def linked(kind: TransportKind | None) -> AsyncGenerator[Pair]:
    async with opened() as pair, AsyncExitStack() as stack:
        if kind is not None:
            for name, engine in pair.engines.items():
                links = call_links(kind, name, engine)
                pair.links[name] = await stack.enter_async_context(links)
        yield pair


@asynccontextmanager
async def opened(model: Model | None = None, timeout_seconds: float = 30.0) -> AsyncGenerator[Pair]:
    pair = Pair(model or model_of("gqa"), timeout_seconds)
    for name, engine in pair.engines.items():
        engine.migrations.listen(pair.heard[name].on_placement)
        await engine.start(pair.heard[name])
    try:
        async with asyncio.timeout(60):
            yield pair
    finally:
        for engine in pair.engines.values():
            await engine.close()


def asked(name: str) -> list[Generation]:
    return [
        generation(prompt_of(4 + 5 * one, one), f"{name}{one}", max_tokens=120, seed=one if one % 2 else None)
        for one in range(8)
    ]


def unmoved(shape: str, name: str) -> dict[str, list[int]]:
    core = core_of(model_of(shape), num_blocks=160)
    for one in asked(name):
        begin_alone(core, one)
    return drain(core).tokens


@pytest.mark.parametrize("kind", [None, "shm", "ucx"], ids=["in memory", "shm", "ucx"])
@pytest.mark.parametrize("module", [whole_layers(1, 3), heads_of(0, 4, (2,)), remote_blocks(4)], ids=repr)
async def test_two_engines_host_for_each_other_while_both_decode(
    module: Module, kind: TransportKind | None
) -> None:
    async with linked(kind) as pair:
        for one in asked("a"):
            await pair.run("a", one)
        for one in asked("b"):
            await pair.run("b", one)
        for number in range(3):
            await asyncio.gather(
                pair.away("a", "b", module, f"ab{number}"), pair.away("b", "a", module, f"ba{number}")
            )
            await asyncio.gather(pair.back("a", "b", f"ab{number}"), pair.back("b", "a", f"ba{number}"))
        for name, heard in pair.heard.items():
            expected = unmoved("gqa", name)
            await heard.until(partial(has_heard, heard, sum(map(len, expected.values()))))
            assert {one: heard.ids(one) for one in expected} == expected
            assert heard.failed == []
            assert [placement.epoch for placement, _ in heard.placements] == [1, 2, 3, 4, 5, 6]
            engine = pair.engines[name]
            assert engine.hosting.hosted() == ()
            assert engine.num_total_blocks == engine.num_free_blocks == 160


async def test_a_host_that_closes_the_guest_is_lost_and_every_token_is_right() -> None:
    async with opened() as pair:
        for one in asked("a"):
            await pair.run("a", one)
        await pair.away("a", "b", heads_of(0, 4, (0, 1)), "m")
        heard = pair.heard["a"]
        await heard.until(lambda: len(heard.ids("a3")) > 2)
        await pair.engines["b"].hosting.close_owner("a")
        expected = unmoved("gqa", "a")
        await heard.until(lambda: all(len(heard.ids(one)) == len(ids) for one, ids in expected.items()))
        assert {one: heard.ids(one) for one in expected} == expected
        assert [lost.partition(":")[0] for _, lost in heard.placements] == ["", "b"]
        assert pair.engines["a"].migrations.placement.placed == ()
        assert pair.engines["a"].num_total_blocks == 160


async def test_a_cancelled_move_leaves_everything_as_it_was_and_another_may_begin() -> None:
    async with opened() as pair:
        await pair.run("a", generation(prompt_of(30), "x", max_tokens=100))
        await pair.begin("a", "b", whole_layers(0, 2), "m")
        other = PlacedModule(move_id="n", module=whole_layers(2, 3), worker="b", num_blocks=400)
        with pytest.raises(MoveRefused, match="one at a time"):
            await pair.engines["a"].migrations.begin_move(
                other, MemoryHost("b", "a", pair.engines["b"].hosting.call, pair.engines["a"].wake)
            )
        await pair.engines["a"].migrations.cancel_move("m")
        with pytest.raises(MoveRefused, match="not under way"):
            await pair.engines["a"].migrations.switch("m")
        await pair.engines["b"].hosting.close("a", "m")
        switched = await pair.away("a", "b", whole_layers(0, 1), "o")
        assert switched.num_blocks_before == 160
        assert switched.num_blocks_after == 160 * 4 // 3


async def test_a_sequence_that_awaits_kv_fails_with_its_host_and_others_are_told_nothing() -> None:
    async with opened() as pair:
        engine, heard = pair.engines["a"], pair.heard["a"]
        await pair.away("a", "b", whole_layers(1, 3), "m")
        waiting = generation(prompt_of(40), "waits")
        assert await engine.reserve(waiting, whole_prompt=True) is not None
        await engine.begin("waits", num_computed_tokens=40, awaits_kv=True)
        await pair.run("a", generation(prompt_of(20, 3), "runs"))
        await engine.migrations.lose_host("b", "its lease ended")
        await heard.until(lambda: heard.failed)
        assert [(one.sequence_id, one.reason) for one in heard.failed] == [("waits", FailureReason.PEER_LOST)]
        await heard.until(lambda: len(heard.ids("runs")) == 24)
        assert engine.load().away_share >= 0


async def test_a_host_that_never_answers_is_lost_after_a_while() -> None:
    async with opened(timeout_seconds=1.5) as pair:
        engine, host, heard = pair.engines["a"], pair.engines["b"], pair.heard["a"]
        is_deaf = False

        def ask(guest: str, call: HostedCall, answer: Answer) -> None:
            if not is_deaf:
                host.hosting.call(guest, call, answer)

        placed = PlacedModule(move_id="m", module=heads_of(0, 4, (1,)), worker="b")
        granted = await host.hosting.open(
            "a",
            "m",
            placed.module,
            num_blocks_wanted=await engine.migrations.capacity_with(placed),
            num_blocks_least=32,
        )
        placed = PlacedModule(move_id="m", module=placed.module, worker="b", num_blocks=granted)
        await engine.migrations.begin_move(placed, MemoryHost("b", "a", ask, engine.wake))
        await engine.migrations.switch("m")
        for one in asked("a"):
            await pair.run("a", one)
        await heard.until(lambda: len(heard.ids("a2")) > 3)
        is_deaf = True
        expected = unmoved("gqa", "a")
        await heard.until(partial(has_heard, heard, sum(map(len, expected.values()))))
        assert {one: heard.ids(one) for one in expected} == expected
        assert "no answer within 1.5 s" in heard.placements[-1][1]


@pytest.mark.parametrize("is_in_step", [True, False])
async def test_an_engine_whose_weights_are_lost_ends_and_its_sequences_can_be_replayed(
    is_in_step: bool,
) -> None:
    known = model_of("gqa")
    made_in_memory = Model(known.config, known.weights, fingerprint=known.fingerprint)
    async with opened(model=made_in_memory) as pair:
        engine, heard = pair.engines["a"], pair.heard["a"]
        module = whole_layers(1, 2)
        await pair.begin("a", "b", module, "m", model_after=made_in_memory.without_layers(module.layers))
        await pair.copy("a", "m")
        await pair.run("a", generation(prompt_of(20), "runs", max_tokens=230))
        assert await engine.reserve(generation(prompt_of(20, 1), "waits"), whole_prompt=True) is not None
        await heard.until(lambda: len(heard.ids("runs")) > 2)
        if is_in_step:
            await pair.engines["b"].hosting.close_owner("a")
        else:
            with pytest.raises(WeightsLost, match=r"layers .1. were at the host b"):
                await engine.migrations.lose_host("b", "its lease ended")
        with pytest.raises(EngineDied, match=r"cannot be read again: .*; restart this worker"):
            await engine.watch()
        assert {one.sequence_id: one.reason for one in heard.failed} == dict.fromkeys(
            ("runs", "waits"), FailureReason.PEER_LOST
        )
