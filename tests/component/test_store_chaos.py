"""Workers that put, find, fetch and vanish at random, over memory and disk too small for all of it, through
several lives of the store: every byte is right, and in the end nothing is held for anybody."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest
from hosted import Hosted
from store_scene import BLOCK_BYTES, StoreScene, Worker, names_of, store_scene

from libs.bus.messages.store import GroupTtls
from libs.kv import layer_groups
from libs.kv.block_tree import DISK, MEMORY
from libs.transport.port import LinkError
from services.kv_store.store import Store

NUM_CHAINS, CHAIN_BLOCKS, NUM_STEPS = 40, 40, 40


@pytest.fixture
async def scene() -> AsyncIterator[StoreScene]:
    async with store_scene() as scene:
        yield scene


class Chaos:
    """One worker after the other on the same store."""

    def __init__(self, scene: StoreScene, store: Hosted, source: random.Random, number: int) -> None:
        self.scene, self.store, self.source, self.number = scene, store, source, number
        self.num_hits = self.num_disk_hits = 0

    async def run(self) -> None:
        worker = await self.scene.worker(self.store, f"worker-{self.number}")
        for _ in range(NUM_STEPS):
            try:
                if not await self.step(worker):
                    await worker.link.close()
                    worker = await self.scene.worker(self.store, f"worker-{self.number}")
            except LinkError as error:
                raise AssertionError("the store gave up a worker that did nothing wrong") from error

    async def step(self, worker: Worker) -> bool:
        """False: this worker is gone."""
        chain = min(self.source.randrange(NUM_CHAINS), self.source.randrange(NUM_CHAINS))
        names = names_of(chain, self.source.randrange(1, CHAIN_BLOCKS))
        match self.source.randrange(12):
            case 0:
                await worker.ask(names)  # and never looks at what comes
                return False
            case 1 | 2 | 3:
                await worker.find(names)
            case 4:
                first = self.source.randrange(len(names))
                parent = names[first - 1] if first else b""
                await worker.put(names[first:], parent)
            case _:
                held = await worker.find(names)
                if held.num_blocks[0]:
                    self.num_disk_hits += held.num_blocks[0] - held.num_in_memory[0]
                    self.num_hits += await worker.fetch(names[: held.num_blocks[0]])
                await worker.put(names)
        return True


def check_that_nothing_is_left(store: Hosted) -> None:
    inner = cast("Store", store.service._store)
    tree, disk = inner.blocks.tree, inner.disk
    assert not tree.num_readers.any()
    assert inner.blocks.slab.num_used_bytes == tree.num_in(MEMORY) * BLOCK_BYTES
    assert disk is not None
    assert disk.num_blocks == tree.num_in(DISK)
    for node in range(tree.num_nodes):
        parent = tree.parent_of(node)
        is_held = tree.is_in(node, MEMORY) or tree.is_in(node, DISK)
        if is_held and parent >= 0:
            assert tree.is_in(parent, MEMORY) or tree.is_in(parent, DISK)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back", "selective"])
async def test_every_byte_is_right_and_nothing_is_left_behind(
    scene: StoreScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_policy: str
) -> None:
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1 << 16)
    num_hits = num_disk_hits = 0
    for life in range(2):
        store = await scene.store(
            memory_blocks=200,
            disk_mib=32,
            folder=tmp_path,
            lease_seconds=0.02,
            write_policy=write_policy,
            eviction=("lru", "lfu")[life],
        )
        crowd = [Chaos(scene, store, random.Random(f"{write_policy} {life} {i}"), i) for i in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for each in crowd:
                tasks.create_task(each.run())
        num_hits += sum(each.num_hits for each in crowd)
        num_disk_hits += sum(each.num_disk_hits for each in crowd)
        await scene.until(lambda store=store: store.gauge("store_num_loading_blocks") == 0)
        inner = cast("Store", store.service._store)
        await inner.drain()
        await scene.until(lambda inner=inner: not inner.blocks.tree.num_readers.any())
        check_that_nothing_is_left(store)
        if life:
            last = await scene.worker(store, "last")
            await last.bus.publish(GroupTtls(epoch=1, rest_ttl_seconds=0.01))
            await scene.until(lambda store=store: store.gauge("store_num_blocks") == 0)
            await inner.drain()
            check_that_nothing_is_left(store)
        assert await store.end() == 0
    assert num_hits > 50
    assert num_disk_hits > 0
