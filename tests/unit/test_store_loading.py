"""Blocks on their way from disk to a worker: layer by layer, shared by all who want them, lost halfway."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from libs.kv import layer_groups
from libs.kv.block_tree import DISK, MEMORY
from libs.kv.checksum import block_checksums, checksum_of_blocks
from services.kv_store.disk.blocks import BlockToRead
from services.kv_store.held_blocks import HeldBlocks, Nodes
from services.kv_store.loading import Load, Loader
from services.kv_store.sending import FetchSource, SendBuffers
from services.kv_store.slab import Bytes

NUM_LAYERS, LAYER_BYTES = SHAPE = (4, 64)
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES


@pytest.fixture(autouse=True)
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(number: int, layer: int) -> Bytes:
    return np.full(LAYER_BYTES, number * NUM_LAYERS + layer, dtype=np.uint8)


class PlayedDisk:
    """Each read of layers waits until the test allows it; blocks in `damaged` fail from a layer on."""

    def __init__(self) -> None:
        self.allowed = asyncio.Semaphore(0)
        self.damaged: dict[bytes, int] = {}
        self.reads: list[tuple[range, list[bytes]]] = []

    def allow(self, num_reads: int = 1000) -> None:
        for _ in range(num_reads):
            self.allowed.release()

    async def read(self, wanted: Sequence[BlockToRead], layers: range) -> list[bool]:
        await self.allowed.acquire()
        self.reads.append((layers, [block.name for block in wanted]))
        for block in wanted:
            number = int.from_bytes(block.name, "little")
            for row, layer in enumerate(layers):
                block.into[row][:] = content(number, layer)
            if block.checksums is not None:
                block.checksums[:] = block_checksums(
                    np.concatenate([content(number, layer) for layer in layers]), len(layers)
                )
        return [layers.start < self.damaged.get(block.name, NUM_LAYERS) for block in wanted]


class Scene:
    """Blocks 1.. in one chain, all of them on disk alone."""

    def __init__(self, memory_blocks: int, num_blocks: int) -> None:
        self.disk = PlayedDisk()
        self.blocks = HeldBlocks(memory_blocks * BLOCK_BYTES, capacity=100)
        self.num_promoted = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.loader = Loader(self.blocks, self.disk, self.spawn, self.promoted)
        for number in range(1, num_blocks + 1):
            parent = name(number - 1) if number > 1 else b""
            node = self.blocks.tree.add(name(number), parent, DISK, 0.0)
            self.blocks.tree.shape[node] = self.blocks.shape_number(SHAPE)

    def spawn(self, load: Load) -> None:
        self.tasks.add(asyncio.create_task(self.loader.run(load)))

    def promoted(self, num_blocks: int) -> None:
        self.num_promoted += num_blocks

    def begin(self, *numbers: int) -> tuple[Nodes, FetchSource]:
        nodes = self.blocks.begin_fetch([name(n) for n in numbers], 0.0)
        assert nodes is not None
        self.loader.load(nodes, 0.0)
        return nodes, FetchSource(self.blocks, nodes, self.loader, self.disk)

    async def layer(self, source: FetchSource, layer: int, *numbers: int) -> bool:
        body = await source.body(range(layer, layer + 1), SendBuffers())
        if body is None:
            return False
        expected = np.concatenate([content(number, layer) for number in numbers])
        assert np.array_equal(body[0], expected)
        assert body[1] == checksum_of_blocks(block_checksums(expected, len(numbers)))
        return True

    async def fetch(self, *numbers: int) -> bool:
        nodes, source = self.begin(*numbers)
        try:
            return all([await self.layer(source, layer, *numbers) for layer in range(NUM_LAYERS)])
        finally:
            self.blocks.end_fetch(nodes)


@asynccontextmanager
async def scene_of(memory_blocks: int, num_blocks: int) -> AsyncIterator[Scene]:
    scene = Scene(memory_blocks, num_blocks)
    async with asyncio.timeout(10):
        yield scene
        scene.disk.allow()
        await asyncio.gather(*scene.tasks)
    assert scene.loader.num_loading == 0
    assert not scene.blocks.tree.num_readers.any()
    num_in_memory = scene.blocks.tree.num_in(MEMORY)
    assert scene.blocks.slab.num_used_bytes == num_in_memory * BLOCK_BYTES


async def test_a_layer_is_sent_before_the_next_is_read() -> None:
    async with scene_of(memory_blocks=8, num_blocks=3) as scene:
        nodes, source = scene.begin(1, 2, 3)
        for layer in range(NUM_LAYERS):
            assert len(scene.disk.reads) == layer
            scene.disk.allow(1)
            assert await scene.layer(source, layer, 1, 2, 3)
        scene.blocks.end_fetch(nodes)
        await asyncio.gather(*scene.tasks)
        assert scene.num_promoted == 3
        assert scene.blocks.find([name(1), name(2), name(3)], 0.0, 0.0).num_in_memory == 3


async def test_all_who_want_a_block_share_one_reading_of_it() -> None:
    async with scene_of(memory_blocks=8, num_blocks=4) as scene:
        found = scene.blocks.find([name(n) for n in (1, 2, 3)], 0.0, 5.0)
        scene.loader.prefetch(found.nodes, 0.0)
        fetches = [
            asyncio.create_task(scene.fetch(*numbers)) for numbers in ((1, 2), (2, 3, 4), (1, 2, 3, 4))
        ]
        await asyncio.sleep(0)
        scene.disk.allow()
        assert await asyncio.gather(*fetches) == [True] * 3
        per_block = [n for layers, names in scene.disk.reads if layers.start == 0 for n in names]
        assert sorted(per_block) == sorted(set(per_block))
        assert scene.num_promoted == 4


@pytest.mark.parametrize("memory_blocks", [2, 8])
async def test_a_block_asked_for_twice_is_loaded_once_and_sent_twice(memory_blocks: int) -> None:
    async with scene_of(memory_blocks, num_blocks=3) as scene:
        twice = np.tile(scene.blocks.find([name(1), name(2), name(3)], 0.0, 0.0).nodes, 2)
        scene.loader.prefetch(twice, 0.0)
        scene.disk.allow()
        assert await scene.fetch(1, 2, 3, 3, 1)
        await asyncio.gather(*scene.tasks)
        assert await scene.fetch(1, 1, 1)


@pytest.mark.parametrize("bad_layer", range(NUM_LAYERS))
async def test_a_block_lost_on_its_way_ends_the_fetch_and_takes_what_follows_along(bad_layer: int) -> None:
    async with scene_of(memory_blocks=8, num_blocks=4) as scene:
        scene.disk.damaged[name(3)] = bad_layer
        scene.disk.allow()
        assert not await scene.fetch(1, 2, 3, 4)
        await asyncio.gather(*scene.tasks)
        assert len(scene.blocks.tree) == 2
        assert await scene.fetch(1, 2)
        assert scene.blocks.begin_fetch([name(1), name(2), name(3)], 0.0) is None


@pytest.mark.parametrize("bad_layer", [None, 0, 2])
async def test_what_finds_no_room_in_memory_is_streamed(bad_layer: int | None) -> None:
    async with scene_of(memory_blocks=2, num_blocks=5) as scene:
        scene.disk.allow()
        assert await scene.fetch(1, 2)
        if bad_layer is not None:
            scene.disk.damaged[name(4)] = bad_layer
        assert await scene.fetch(1, 2, 3, 4, 5) == (bad_layer is None)
        assert scene.num_promoted == 2
        assert len(scene.blocks.tree) == (5 if bad_layer is None else 3)


async def test_a_question_alone_pushes_nothing_out_that_others_were_promised() -> None:
    async with scene_of(memory_blocks=8, num_blocks=12) as scene:
        scene.disk.allow()
        chain = [name(n) for n in range(1, 13)]
        assert await scene.fetch(*range(1, 9))
        promised = scene.blocks.find(chain[:8], 0.0, 5.0)
        scene.loader.prefetch(scene.blocks.find(chain, 1.0, 5.0).nodes, 1.0)
        assert scene.loader.num_loading == 0
        assert scene.blocks.tree.are_in(promised.nodes, MEMORY).all()
        # Later, or for one who fetches, they may go: the disk has them still.
        scene.loader.prefetch(scene.blocks.find(chain, 7.0, 0.0).nodes, 7.0)
        assert scene.loader.num_loading == 2


async def test_questions_load_no_more_than_a_part_of_memory() -> None:
    async with scene_of(memory_blocks=16, num_blocks=12) as scene:
        found = scene.blocks.find([name(n) for n in range(1, 13)], 0.0, 5.0)
        scene.loader.prefetch(found.nodes, 0.0)
        scene.loader.prefetch(found.nodes, 0.0)
        assert scene.loader.num_loading == 4


async def test_a_cancelled_load_gives_its_room_back() -> None:
    async with scene_of(memory_blocks=8, num_blocks=3) as scene:
        nodes, source = scene.begin(1, 2, 3)
        await asyncio.sleep(0)
        (task,) = scene.tasks
        task.cancel()
        scene.tasks.clear()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await scene.layer(source, 0, 1, 2, 3)
        scene.blocks.end_fetch(nodes)
        assert scene.blocks.slab.num_used_bytes == 0
        assert len(scene.blocks.tree) == 3
