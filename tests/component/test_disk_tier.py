import asyncio
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from disk_blocks import (
    CAP_BYTES,
    SETTINGS,
    SHAPE,
    block,
    body_of,
    chain,
    fill,
    name_of,
    names_of,
    opened,
    read,
)

from services.kv_store.disk.blocks import BlockToRead
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.disk.segment_files import SYSTEM, Rows
from services.kv_store.disk.settings import DiskSettings
from services.kv_store.disk.volume import FolderUnusable


async def test_what_was_written_is_read_and_what_was_not_is_a_miss(tmp_path: Path) -> None:
    blocks = chain(0, 70)
    async with opened(tmp_path) as (tier, held):
        assert held == []
        assert all(await tier.write(blocks))
        answer = await read(tier, [*names_of(blocks), name_of(999)])
        assert answer.right == names_of(blocks)
        assert answer.missed == [name_of(999)]
        assert (tier.counts.num_written, tier.counts.num_read, tier.counts.num_missing) == (70, 70, 1)
        assert tier.num_blocks == 70
        assert tier.num_used_bytes == 70 * SHAPE[0] * SHAPE[1]


async def test_a_restart_lists_all_blocks_with_parents_first_and_reads_them(tmp_path: Path) -> None:
    blocks = chain(0, 40) + chain(100, 40)
    await fill(tmp_path, list(reversed(blocks)))
    async with opened(tmp_path) as (tier, held):
        listed = names_of(held)
        assert sorted(listed) == sorted(names_of(blocks))
        parents = {b.name: b.parent for b in blocks}
        for found in held:
            assert found.parent == parents[found.name]
            assert (found.num_layers, found.layer_bytes) == SHAPE
            assert found.parent == b"" or listed.index(found.parent) < listed.index(found.name)
        assert not (await read(tier, names_of(blocks))).missed
        assert tier.num_blocks == 80


async def test_layers_can_be_read_a_few_at_a_time_with_their_checksums(tmp_path: Path) -> None:
    blocks = chain(0, 40)
    async with opened(tmp_path) as (tier, _):
        await tier.write(blocks)
        for layers in (range(1), range(1, 4), range(4, 6)):
            into = np.zeros((len(layers), len(blocks), SHAPE[1]), np.uint8)
            checksums = np.zeros((len(layers), len(blocks)), np.uint64)
            wanted = [
                BlockToRead(b.name, [row[i] for row in into], checksums[:, i]) for i, b in enumerate(blocks)
            ]
            assert all(await tier.read(wanted, layers))
            for i, b in enumerate(blocks):
                assert np.array_equal(into[:, i], body_of(b.name)[layers.start : layers.stop])
                assert np.array_equal(checksums[:, i], b.checksums[layers.start : layers.stop])


async def test_rows_of_another_size_or_layers_beyond_the_last_are_a_miss(tmp_path: Path) -> None:
    blocks = chain(0, 3)
    async with opened(tmp_path) as (tier, _):
        await tier.write(blocks)
        short = BlockToRead(blocks[0].name, [np.zeros(SHAPE[1] - 1, np.uint8)])
        assert await tier.read([short], range(1)) == [False]
        beyond = BlockToRead(blocks[1].name, [np.zeros(SHAPE[1], np.uint8)])
        assert await tier.read([beyond], range(SHAPE[0], SHAPE[0] + 1)) == [False]


async def test_a_name_asked_for_twice_in_one_read_is_filled_twice(tmp_path: Path) -> None:
    blocks = chain(0, 2)
    async with opened(tmp_path) as (tier, _):
        await tier.write(blocks)
        assert len((await read(tier, [blocks[0].name] * 3)).right) == 3


async def test_removed_blocks_stay_gone_and_their_room_is_used_again(
    tmp_path: Path,
) -> None:
    blocks = chain(0, 64)
    async with opened(tmp_path) as (tier, _):
        await tier.write(blocks)
        before_bytes = tier.num_file_bytes
        await tier.remove([*names_of(blocks[:32]), name_of(777)])
        assert (await read(tier, names_of(blocks))).missed == names_of(blocks[:32])
        await tier.write(chain(200, 32))
        assert tier.num_file_bytes < before_bytes + (256 << 10)
    async with opened(tmp_path) as (tier, held):
        assert sorted(names_of(held)) == sorted(names_of(blocks[32:]) + names_of(chain(200, 32)))


async def test_a_block_written_again_is_held_once(tmp_path: Path) -> None:
    blocks = chain(0, 40)
    async with opened(tmp_path) as (tier, _):
        assert all(await tier.write(blocks))
        assert all(await tier.write([*blocks[10:20], blocks[10]]))
        assert tier.num_blocks == 40
        assert not (await read(tier, names_of(blocks))).missed
    async with opened(tmp_path) as (tier, held):
        assert len(held) == tier.num_blocks == 40


async def test_blocks_of_several_shapes_lie_side_by_side(tmp_path: Path) -> None:
    shapes = {(1, 16): 40, (3, 5000): 40, (2, 1 << 20): 3}
    async with opened(tmp_path) as (tier, _):
        groups = {shape: chain(1000 * i, n, shape) for i, (shape, n) in enumerate(shapes.items())}
        assert all(await tier.write([b for group in groups.values() for b in group]))
    async with opened(tmp_path) as (tier, held):
        assert len(held) == sum(shapes.values())
        for shape, group in groups.items():
            assert not (await read(tier, names_of(group), shape)).missed


async def test_can_write_says_what_write_then_does(tmp_path: Path) -> None:
    num_layers, layer_bytes = shape = (4, 64 << 10)
    async with opened(tmp_path) as (tier, _):
        written = 0
        while tier.can_write(16, num_layers, layer_bytes):
            assert all(await tier.write(chain(written, 16, shape)))
            written += 16
        assert 0.75 * CAP_BYTES < tier.num_file_bytes <= tier.cap_bytes == CAP_BYTES
        assert not all(await tier.write(chain(written, 16, shape)))
        await tier.remove(names_of(chain(0, 16, shape)))
        assert tier.can_write(16, num_layers, layer_bytes)
        assert not tier.can_write(1000, num_layers, layer_bytes)


async def test_what_waits_to_be_written_counts_as_written(tmp_path: Path) -> None:
    shape = (4, 64 << 10)
    async with opened(tmp_path) as (tier, _):
        writes = []
        for start in range(0, 1000, 16):
            if not tier.can_write(16, *shape):
                break
            writes.append(asyncio.ensure_future(tier.write(chain(start, 16, shape))))
            await asyncio.sleep(0)
        assert all(all(held) for held in await asyncio.gather(*writes))
        assert tier.num_file_bytes <= CAP_BYTES


async def test_writes_beyond_what_may_wait_are_refused_not_queued(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, max_pending_write_bytes=1)
    async with opened(tmp_path, settings) as (tier, _):
        first, second = await asyncio.gather(tier.write(chain(0, 4)), tier.write(chain(10, 4)))
        assert first == [True] * 4
        assert second == [False] * 4


async def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    blocks = chain(0, 8)
    async with opened(tmp_path) as (tier, _):
        await tier.write(blocks)
        second = DiskTier(tmp_path, SETTINGS)
        with pytest.raises(FolderUnusable, match="in use by another store"):
            await second.open()
        await second.close()
        assert not (await read(tier, names_of(blocks))).missed


async def test_a_folder_that_is_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    tier = DiskTier(tmp_path / "taken", SETTINGS)
    with pytest.raises(FolderUnusable, match="taken"):
        await tier.open()
    await tier.close()


@pytest.mark.parametrize("fsync", ["off", "interval", "always"])
async def test_every_fsync_policy_keeps_what_was_written(tmp_path: Path, fsync: str) -> None:
    settings = msgspec.convert(
        {"cap_bytes": CAP_BYTES, "fsync": fsync, "fsync_interval_seconds": 0.01}, DiskSettings
    )
    async with opened(tmp_path, settings) as (tier, _):
        assert all(await tier.write(chain(0, 40)))
    async with opened(tmp_path, settings) as (tier, _):
        assert not (await read(tier, names_of(chain(0, 40)))).missed


class CountingSync:
    """The system, with a signal when a file was flushed."""

    pwritev, preadv = staticmethod(SYSTEM.pwritev), staticmethod(SYSTEM.preadv)

    def __init__(self) -> None:
        self.flushed = threading.Event()
        self.num_flushed = 0

    def fdatasync(self, fd: int, /) -> None:
        SYSTEM.fdatasync(fd)
        self.num_flushed += 1
        self.flushed.set()


async def test_at_an_interval_written_files_are_flushed_and_only_those(tmp_path: Path) -> None:
    system = CountingSync()
    settings = msgspec.structs.replace(SETTINGS, fsync="interval", fsync_interval_seconds=0.01)
    tier = DiskTier(tmp_path, settings, system=system)
    await tier.open()
    running = asyncio.ensure_future(tier.run(lambda: None))
    await tier.write(chain(0, 4))
    assert await asyncio.to_thread(system.flushed.wait, 20)
    running.cancel()
    await asyncio.wait([running])
    await tier.close()
    assert system.num_flushed == 1


class SlowReads:
    """The system, reading only once it is let."""

    pwritev, fdatasync = staticmethod(SYSTEM.pwritev), staticmethod(SYSTEM.fdatasync)

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffers: Rows, offset: int, /) -> int:
        self.begun.set()
        self.let.wait(20)
        return SYSTEM.preadv(fd, buffers, offset)


async def test_a_cancelled_read_ends_only_when_its_rows_are_left_alone(tmp_path: Path) -> None:
    system = SlowReads()
    tier = DiskTier(tmp_path, SETTINGS, system=system)
    await tier.open()
    await tier.write(chain(0, 1))
    row = np.zeros(SHAPE[1], np.uint8)
    reading = asyncio.ensure_future(tier.read([BlockToRead(name_of(0), [row])], range(1)))
    await asyncio.to_thread(system.begun.wait, 20)
    reading.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not reading.done()
    system.let.set()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert np.array_equal(row, body_of(name_of(0))[0])
    await tier.close()


async def test_a_read_under_way_ends_right_although_its_block_is_removed(tmp_path: Path) -> None:
    system = SlowReads()
    tier = DiskTier(tmp_path, SETTINGS, system=system)
    await tier.open()
    await tier.write(chain(0, 1))
    reading = asyncio.ensure_future(read(tier, [name_of(0)]))
    await asyncio.to_thread(system.begun.wait, 20)
    await tier.remove([name_of(0)])
    await tier.write([block(name_of(5))])
    system.let.set()
    assert (await reading).right == [name_of(0)]
    assert (await read(tier, [name_of(5)])).right == [name_of(5)]
    await tier.close()
