"""A store with a disk below its memory: what memory gives up, and an earlier life left, is hit again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hosted import Hosted
from store_scene import StoreScene, Worker, names_of, store_scene
from structlog.testing import capture_logs

from libs.kv import layer_groups


@pytest.fixture
async def scene() -> AsyncIterator[StoreScene]:
    async with store_scene() as scene:
        yield scene


@pytest.fixture
def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1)


async def put_all(
    scene: StoreScene, store: Hosted, worker: Worker, *chains: int, num_blocks: int = 8
) -> None:
    """Put these chains one after the other, each written to disk before the next comes."""
    for chain in chains:
        num_wanted = store.gauge("store_tier_blocks", tier="disk") + num_blocks
        await worker.put(names_of(chain, num_blocks))
        await scene.until(
            lambda num_wanted=num_wanted: store.gauge("store_tier_blocks", tier="disk") == num_wanted
        )


@pytest.mark.usefixtures("layer_by_layer")
async def test_what_memory_gave_up_comes_from_disk_and_is_in_memory_again(
    scene: StoreScene, tmp_path: Path
) -> None:
    store = await scene.store(memory_blocks=16, disk_mib=64, folder=tmp_path, lease_seconds=0.001)
    worker = await scene.worker(store)
    await put_all(scene, store, worker, 1, 2, 3, 4)
    assert await worker.held(names_of(1, 8)) == (8, 0)
    assert await worker.held(names_of(4, 8)) == (8, 8)
    assert store.gauge("store_tier_evicted_blocks_total", tier="dram") == 16
    assert await worker.fetch(names_of(1, 8))
    await scene.until(lambda: store.gauge("store_promoted_blocks_total") == 8)
    assert await worker.held(names_of(1, 8)) == (8, 8)
    await scene.until(lambda: store.gauge("store_num_loading_blocks") == 0)
    assert store.gauge("store_used_bytes") == 16 * 4 * 4096


async def test_a_question_brings_blocks_into_memory_before_they_are_fetched(
    scene: StoreScene, tmp_path: Path
) -> None:
    store = await scene.store(memory_blocks=16, disk_mib=64, folder=tmp_path, lease_seconds=0.001)
    worker = await scene.worker(store)
    await put_all(scene, store, worker, 1, 2, 3, num_blocks=4)
    await put_all(scene, store, worker, 4, num_blocks=8)
    answer = await worker.find(names_of(1, 6))
    assert (answer.num_blocks, answer.num_in_memory) == ((4,), (0,))
    await scene.until(lambda: store.gauge("store_promoted_blocks_total") == 4)
    assert store.gauge("store_tier_hits_total", tier="disk") == 4
    assert store.gauge("store_tier_misses_total", tier="disk") == 2
    memory, disk = store.service.load().tiers
    assert (memory.tier, memory.num_hit_blocks, memory.num_asked_blocks) == ("dram", 0, 6)
    assert (disk.tier, disk.num_hit_blocks, disk.num_asked_blocks, disk.is_paused) == ("disk", 4, 6, False)
    assert (memory.num_blocks, memory.num_bytes) == (16, memory.capacity_bytes)
    assert disk.num_blocks == store.gauge("store_tier_blocks", tier="disk") == 20
    assert 20 * 4 * 4096 <= disk.num_bytes <= disk.capacity_bytes


@pytest.mark.parametrize("memory_blocks", [4, 12])
async def test_a_prompt_larger_than_memory_streams_from_disk(
    scene: StoreScene, tmp_path: Path, memory_blocks: int
) -> None:
    store = await scene.store(memory_blocks=memory_blocks, disk_mib=64, folder=tmp_path, lease_seconds=0.001)
    worker = await scene.worker(store)
    chain = names_of(1, 16)
    for first in range(0, 16, 4):
        await worker.put(chain[first : first + 4], parent=chain[first - 1] if first else b"")
        await scene.until(lambda first=first: store.gauge("store_tier_blocks", tier="disk") == first + 4)
    assert (await worker.held(chain))[0] == 16
    for _ in range(3):
        assert await worker.fetch(chain)
    assert store.gauge("store_used_bytes") <= memory_blocks * 4 * 4096


async def test_many_workers_fetch_from_both_tiers_at_once(scene: StoreScene, tmp_path: Path) -> None:
    store = await scene.store(memory_blocks=24, disk_mib=64, folder=tmp_path, lease_seconds=0.001)
    workers = [await scene.worker(store, f"worker-{i}") for i in range(4)]
    await put_all(scene, store, workers[0], *range(12))

    async def fetch_all(worker: Worker, first: int) -> None:
        for chain in range(first, first + 12):
            names = names_of(chain % 12, 8)
            held = await worker.find(names)
            assert held.num_blocks == (8,)
            assert await worker.fetch(names)

    await asyncio.gather(*(fetch_all(worker, 3 * i) for i, worker in enumerate(workers)))
    assert store.gauge("store_tier_hits_total", tier="disk") > 0
    assert store.gauge("store_tier_hits_total", tier="dram") > 0
    await scene.until(lambda: store.gauge("store_num_loading_blocks") == 0)


@pytest.mark.parametrize("drained", [True, False])
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
async def test_a_store_hits_what_an_earlier_life_left_on_disk(
    scene: StoreScene, tmp_path: Path, write_policy: str, drained: bool
) -> None:
    first = await scene.store(disk_mib=64, folder=tmp_path, write_policy=write_policy)
    worker = await scene.worker(first)
    await worker.put(names_of(1, 8))
    await worker.put(names_of(1, 8, first=8), parent=names_of(1, 8)[-1])
    await scene.until(lambda: first.gauge("store_num_blocks") == 16)
    if write_policy == "write_through":
        await scene.until(lambda: first.gauge("store_tier_blocks", tier="disk") == 16)
    assert await first.end(drained=drained) == 0
    second = await scene.store(disk_mib=64, folder=tmp_path)
    worker = await scene.worker(second)
    num_held = 16 if drained or write_policy == "write_through" else 0
    assert await worker.held(names_of(1, 16)) == (num_held, 0)
    assert await worker.fetch(names_of(1, 16)) == bool(num_held)


async def test_selective_writes_only_what_is_asked_for_twice(scene: StoreScene, tmp_path: Path) -> None:
    store = await scene.store(disk_mib=64, folder=tmp_path, write_policy="selective")
    worker = await scene.worker(store)
    await worker.put(names_of(1, 4))
    await worker.put(names_of(2, 4))
    await scene.until(lambda: store.gauge("store_num_blocks") == 8)
    for _ in range(2):
        assert store.gauge("store_tier_blocks", tier="disk") == 0
        await worker.find(names_of(2, 4))
    await worker.find(names_of(1, 4))
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") == 4)
    assert await store.end() == 0
    second = await scene.store(disk_mib=64, folder=tmp_path)
    worker = await scene.worker(second)
    assert [await worker.held(names_of(chain, 4)) for chain in (1, 2)] == [(0, 0), (4, 0)]


async def test_write_back_has_written_what_memory_gives_up(scene: StoreScene, tmp_path: Path) -> None:
    store = await scene.store(
        memory_blocks=32, disk_mib=64, folder=tmp_path, write_policy="write_back", lease_seconds=0.001
    )
    worker = await scene.worker(store)
    for chain in range(16):
        await worker.put(names_of(chain, 4))
        await scene.until(lambda chain=chain: store.gauge("store_puts_total", result="held") == chain + 1)
        await scene.until(lambda: store.gauge("store_num_unwritten_blocks") == 0)
    await scene.until(lambda: store.gauge("store_tier_blocks", tier="disk") >= 32)
    # Eight of the chains are in memory still, and not all of those were worth a write yet.
    assert store.gauge("store_tier_blocks", tier="disk") < 64
    assert [(await worker.held(names_of(chain, 4)))[0] for chain in range(16)] == [4] * 16


def num_bytes_of(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


async def fill_twice_over(scene: StoreScene, folder: Path, first_chain: int) -> None:
    store = await scene.store(memory_blocks=256, disk_mib=32, folder=folder, lease_seconds=0.001)
    worker = await scene.worker(store)
    for number in range(80):
        await worker.put(names_of(first_chain + number, 64))
        await scene.until(lambda number=number: store.gauge("store_puts_total", result="held") == number + 1)
        # What the disk is too slow for leaves memory unwritten: here all is to be written.
        await scene.until(lambda: store.gauge("store_num_unwritten_blocks") == 0)
    assert store.gauge("store_disk_writes_total", result="skipped") == 0
    assert store.gauge("store_tier_evicted_blocks_total", tier="disk") > 0
    assert (await worker.held(names_of(first_chain + 78, 64)))[0] == 64
    assert await worker.fetch(names_of(first_chain + 78, 64))
    assert await store.end() == 0


async def test_five_times_the_cap_over_two_lives_stays_within_it(scene: StoreScene, tmp_path: Path) -> None:
    for life in range(2):
        await fill_twice_over(scene, tmp_path, first_chain=life * 1000)
        assert num_bytes_of(tmp_path) <= 1.05 * (32 << 20)


async def test_a_damaged_file_is_a_miss_and_the_store_goes_on(scene: StoreScene, tmp_path: Path) -> None:
    first = await scene.store(disk_mib=64, folder=tmp_path)
    worker = await scene.worker(first)
    await put_all(scene, first, worker, 1)
    assert await first.end() == 0
    for path in (tmp_path / "store-0" / "segments").iterdir():
        data = bytearray(path.read_bytes())
        for at in range(0, len(data), 512):
            data[at] ^= 1
        path.write_bytes(data)
    second = await scene.store(disk_mib=64, folder=tmp_path)
    worker = await scene.worker(second)
    assert not await worker.fetch(names_of(1, 8))
    await scene.until(lambda: second.gauge("store_disk_reads_total", result="corrupt") > 0)
    assert await worker.held(names_of(1, 8)) == (0, 0)
    await put_all(scene, second, worker, 1)
    assert await worker.fetch(names_of(1, 8))
    await scene.until(lambda: second.gauge("store_num_loading_blocks") == 0)


async def test_a_damaged_index_is_an_error_in_the_log_and_an_empty_disk_that_fills_again(
    scene: StoreScene, tmp_path: Path
) -> None:
    first = await scene.store(disk_mib=64, folder=tmp_path)
    await put_all(scene, first, await scene.worker(first), 1)
    assert await first.end() == 0
    for path in (tmp_path / "store-0" / "index").glob("*.sst"):
        path.write_bytes(bytes(path.stat().st_size))
    for path in (tmp_path / "store-0" / "index").glob("MANIFEST*"):
        path.write_bytes(bytes(path.stat().st_size))
    with capture_logs() as logs:
        second = await scene.store(disk_mib=64, folder=tmp_path)
    assert [one["log_level"] for one in logs if one["event"] == "disk_index_dropped"] == ["error"]
    assert second.gauge("store_disk_index_repairs_total") == 1
    worker = await scene.worker(second)
    assert await worker.held(names_of(1, 8)) == (0, 0)
    await put_all(scene, second, worker, 1)
    assert await second.end() == 0
    third = await scene.store(disk_mib=64, folder=tmp_path)
    assert third.gauge("store_disk_index_repairs_total") == 0
    assert await (await scene.worker(third)).fetch(names_of(1, 8))


async def test_a_folder_that_cannot_be_used_ends_the_start_with_a_word(
    scene: StoreScene, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(AssertionError, match="did not start"):
        await scene.store(disk_mib=64, folder=tmp_path / "file")
    (living,) = scene.stores
    assert living.task is not None
    assert living.task.result() == 2
