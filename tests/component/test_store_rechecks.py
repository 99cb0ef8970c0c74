"""Blocks that a worker found corrupt: the store looks itself, drops what is wrong, nothing else."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hosted import Hosted
from store_scene import StoreScene, Worker, names_of, store_scene

from libs.bus.messages.store import BlocksCorrupt

CHAIN = names_of(1, 8)


@pytest.fixture
async def scene() -> AsyncIterator[StoreScene]:
    async with store_scene() as scene:
        yield scene


def flip_bit(store: Hosted, name: bytes, layer: int = 2) -> None:
    """As bad memory does."""
    blocks = store.service._store.blocks  # type: ignore[union-attr]  # it is open
    node = blocks.tree.node_of(name)
    (piece,) = blocks.slab.pieces(blocks.tree.slot[node : node + 1], range(layer, layer + 1))
    piece.data[0, 0, 77] ^= 16


async def doubt(worker: Worker, names: Sequence[bytes]) -> None:
    await worker.bus.publish(BlocksCorrupt(names=b"".join(names)), to=worker.store.incarnation)


def found(store: Hosted) -> dict[str, float]:
    results = ("right", "dropped")
    return {result: store.gauge("store_rechecked_blocks_total", result=result) for result in results}


async def holding(scene: StoreScene, *, disk: Path | None = None) -> tuple[Hosted, Worker]:
    """One chain of 8, from whose fourth block another branch of 2 goes, and a chain of its own."""
    store = await scene.store(disk_mib=64 if disk else 0, folder=disk, lease_seconds=60)
    worker = await scene.worker(store)
    await worker.put(CHAIN)
    await worker.put(names_of(2, 2), parent=CHAIN[3])
    await worker.put(names_of(3, 2))
    await scene.until(lambda: store.gauge("store_num_blocks") == 12)
    if disk:
        await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 12)
    return store, worker


async def test_what_is_wrong_in_memory_goes_with_what_hangs_on_it_and_can_be_put_again(
    scene: StoreScene,
) -> None:
    store, worker = await holding(scene)
    await worker.find(CHAIN)  # a lease does not save what is wrong
    flip_bit(store, CHAIN[3])
    await doubt(worker, CHAIN)
    await scene.until(lambda: found(store) == {"right": 3, "dropped": 7})
    assert await worker.held(CHAIN) == (3, 3)
    assert await worker.held(names_of(2, 2)) == (0, 0)
    assert await worker.fetch(names_of(3, 2))
    await worker.put(CHAIN[3:], parent=CHAIN[2])
    await scene.until(lambda: store.gauge("store_num_blocks") == 10)
    assert await worker.fetch(CHAIN)


async def test_a_worker_that_doubts_what_is_right_throws_nothing_away(scene: StoreScene) -> None:
    store, worker = await holding(scene)
    await doubt(worker, [*CHAIN, *CHAIN, *names_of(9, 3)])
    await scene.until(lambda: found(store)["right"] == 8)
    await worker.bus.publish(BlocksCorrupt(names=b"no names"), to=store.incarnation)
    for _ in range(500):
        await doubt(worker, CHAIN)
    assert await worker.fetch(CHAIN)
    assert store.gauge("store_num_blocks") == 12
    assert found(store)["dropped"] == 0


async def test_what_is_wrong_in_memory_is_dropped_from_disk_as_well(
    scene: StoreScene, tmp_path: Path
) -> None:
    store, worker = await holding(scene, disk=tmp_path)
    flip_bit(store, CHAIN[7])
    await doubt(worker, CHAIN)
    await scene.until(lambda: found(store) == {"right": 7, "dropped": 1})
    assert await worker.held(CHAIN) == (7, 7)
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 11)
    await worker.put(CHAIN[7:], parent=CHAIN[6])
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 12)
    assert await worker.fetch(CHAIN)


async def test_a_wrong_block_that_is_being_fetched_stays_until_that_has_ended(scene: StoreScene) -> None:
    store, worker = await holding(scene)
    held_store = store.service._store
    assert held_store is not None
    nodes = held_store.begin_fetch(CHAIN)
    assert nodes is not None
    flip_bit(store, CHAIN[0])
    await doubt(worker, CHAIN)
    await scene.until(lambda: found(store)["dropped"] == 10)
    assert await worker.held(CHAIN) == (0, 0)
    assert held_store.blocks.slab.num_used_bytes == 10 * 4 * 4096  # the branch had no reader
    held_store.blocks.end_fetch(nodes)
    assert held_store.blocks.slab.num_used_bytes == 2 * 4 * 4096
