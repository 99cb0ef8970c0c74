"""An engine copies the KV of a move while one step is under way, and switches at the first boundary."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import torch
from engine_harness import WAIT_SECONDS, Listener
from engine_moves import SIZE, core_of, generation, model_of, prompt_of
from memory_host import synchronous_host

from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention
from libs.engine import thread
from libs.engine.engine import Engine, EngineSettings
from libs.engine.hosting.port import Host
from libs.placement.module import heads_of
from libs.placement.placement import PlacedModule

PIECE_BYTES = 4 * 2 * SIZE * 16 * 4 * 4
"""Four blocks of one head."""


class SteppedAttention(ReferenceAttention):
    """Once `is_stepped`, waits before each layer until it is let through."""

    def __init__(self) -> None:
        self.is_stepped = False
        self.passes = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        if self.is_stepped:
            self.arrived.release()
            if not self.passes.acquire(timeout=WAIT_SECONDS):
                raise TimeoutError("nobody let this layer through")
        return super().attend(q, kv, batch, scale)

    async def at_layer(self) -> None:
        assert await asyncio.to_thread(self.arrived.acquire, timeout=WAIT_SECONDS)

    async def through(self, num_layers: int) -> None:
        """Lets so many layers through and returns when the next one waits."""
        for _ in range(num_layers):
            self.passes.release()
            await self.at_layer()


class Scene:
    """A home whose first prompt of twenty blocks is over, and a head of it that has begun to move."""

    def __init__(self) -> None:
        self.attention, self.heard = SteppedAttention(), Listener()
        sizes = EngineSettings(
            max_model_len=256, num_blocks=120, block_size=SIZE, max_num_batched_tokens=170, max_num_seqs=8
        )
        self.engine = Engine(model_of("mha"), sizes, attention=self.attention)
        self.host_core = core_of(model_of("mha"), "host", num_blocks=400)

    @property
    def host(self) -> Host:
        return synchronous_host("host", "home", self.host_core.hosted)

    async def begin(self) -> int:
        module = heads_of(0, 4, (1,))
        placed = PlacedModule(move_id="m", module=module, worker="host")
        wanted = await self.engine.migrations.capacity_with(placed)
        granted = self.host_core.hosted.open(
            "home", "m", module, num_blocks_wanted=wanted, num_blocks_least=1, layers=None
        )
        placed = PlacedModule(move_id="m", module=module, worker="host", num_blocks=granted)
        return await self.engine.migrations.begin_move(placed, self.host)

    async def run(self, name: str, kind: int, *, num_tokens: int = 159, max_tokens: int = 1) -> None:
        asked = generation(prompt_of(num_tokens, kind), name, max_tokens=max_tokens)
        assert await self.engine.reserve(asked, whole_prompt=True) is not None
        await self.engine.begin(name, num_computed_tokens=0)

    async def begin_long_step(self, num_tokens: int = 159) -> None:
        self.attention.is_stepped = True
        await self.run("long", 1, num_tokens=num_tokens, max_tokens=8)
        await self.attention.at_layer()

    async def end_long_step(self) -> None:
        self.attention.is_stepped = False
        self.attention.passes.release(4)
        await self.heard.until(lambda: self.heard.ids("long"))


@asynccontextmanager
async def opened() -> AsyncGenerator[Scene]:
    scene = Scene()
    await scene.engine.start(scene.heard)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await scene.run("before", 0)
            await scene.heard.until(lambda: scene.heard.ids("before"))
            yield scene
    finally:
        scene.attention.is_stepped = False
        scene.attention.passes.release(100)
        await scene.engine.close()


async def test_pieces_are_copied_between_the_layers_of_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "_PIECE_GAP_SECONDS", 0.0)
    async with opened() as scene:
        assert await scene.begin() == 19
        await scene.begin_long_step()
        lefts: list[int] = []
        for _ in range(3):
            piece = asyncio.ensure_future(scene.engine.migrations.copy_some("m", PIECE_BYTES))
            await asyncio.sleep(0)  # it is in the mailbox
            await scene.attention.through(1)
            lefts.append((await piece).num_left_blocks)
        assert lefts == [15, 11, 7]
        assert scene.heard.ids("long") == []  # the step is not over
        switch = asyncio.ensure_future(scene.engine.migrations.switch("m"))
        await scene.end_long_step()
        switched = await switch
        assert switched.placement.placed[0].move_id == "m"
        await scene.heard.until(lambda: len(scene.heard.ids("long")) == 8)
        plain = core_of(model_of("mha"), max_num_batched_tokens=200)
        asked = generation(prompt_of(159, 1), "long", max_tokens=8)
        assert plain.sequences.reserve(asked, "long", whole_prompt=True) is not None
        plain.sequences.begin("long", num_computed_tokens=0)
        expected = [token.token_id for _ in range(8) for token in plain.step().tokens]
        assert scene.heard.ids("long") == expected


async def test_a_switch_comes_at_the_next_boundary_although_long_steps_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "_PIECE_GAP_SECONDS", 0.0)
    async with opened() as scene:
        await scene.begin()
        await scene.begin_long_step(num_tokens=240)
        switch = asyncio.ensure_future(scene.engine.migrations.switch("m"))
        await scene.attention.through(2)
        assert not switch.done()
        await scene.attention.through(1)  # the last layer of a chunk is not attended: this is the next step
        await switch
        assert scene.heard.ids("long") == []


async def test_short_steps_are_not_lengthened_by_more_than_a_piece_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "_PIECE_GAP_SECONDS", 3600.0)
    async with opened() as scene:
        await scene.begin()
        await scene.engine.migrations.copy_some("m", PIECE_BYTES)
        await scene.begin_long_step()
        piece = asyncio.ensure_future(scene.engine.migrations.copy_some("m", PIECE_BYTES))
        await asyncio.sleep(0)
        await scene.attention.through(3)
        assert not piece.done()
        await scene.end_long_step()
        await piece
