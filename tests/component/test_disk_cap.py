import asyncio
import random
from pathlib import Path

import msgspec
import pytest
from disk_blocks import CAP_BYTES, SETTINGS, Shape, chain, disk_usage_bytes, names_of, opened, read

from services.kv_store.disk.disk_tier import DiskTier


async def write_evicting_the_oldest(
    tier: DiskTier, held: list[bytes], first: int, num_blocks: int, shape: Shape
) -> None:
    """As a store does it: what was written longest ago goes first."""
    for start in range(first, first + num_blocks, 16):
        while not tier.can_write(16, *shape):
            await tier.remove(held[:16])
            del held[:16]
        batch = chain(start, 16, shape)
        assert all(await tier.write(batch))
        held += names_of(batch)


@pytest.mark.parametrize("shape", [(4, 32 << 10), (30, 4096), (3, 5000)])
async def test_five_times_the_cap_with_restarts_between_stays_under_it(tmp_path: Path, shape: Shape) -> None:
    num_per_part = -(-CAP_BYTES // (shape[0] * shape[1] * 8 * 16)) * 16
    held: list[bytes] = []
    peak_bytes = 0
    for life in range(5):
        async with opened(tmp_path) as (tier, found):
            assert set(names_of(found)) == set(held)
            for part in range(8):
                first = (8 * life + part) * num_per_part
                await write_evicting_the_oldest(tier, held, first, num_per_part, shape)
                peak_bytes = max(peak_bytes, await asyncio.to_thread(disk_usage_bytes, tmp_path))
            assert tier.num_blocks == len(held)
            assert not (await read(tier, held, shape)).missed
        peak_bytes = max(peak_bytes, disk_usage_bytes(tmp_path))
    assert 0.7 * CAP_BYTES < peak_bytes <= 1.05 * CAP_BYTES


async def test_usage_stays_under_the_cap_when_blocks_go_in_any_order(tmp_path: Path) -> None:
    shape, rnd, held = (4, 8192), random.Random(5), list[bytes]()
    async with opened(tmp_path) as (tier, _):
        for start in range(0, 3 * CAP_BYTES // (4 * 8192), 16):
            while not tier.can_write(16, *shape):
                rnd.shuffle(held)
                await tier.remove(held[:16])
                del held[:16]
            batch = chain(start, 16, shape)
            assert all(await tier.write(batch))
            held += names_of(batch)
        assert disk_usage_bytes(tmp_path) <= 1.05 * CAP_BYTES
        assert not (await read(tier, held, shape)).missed


async def test_blocks_of_another_shape_get_room_once_enough_others_went(tmp_path: Path) -> None:
    old, new = (4, 32 << 10), (2, 100_000)
    held: list[bytes] = []
    async with opened(tmp_path) as (tier, _):
        await write_evicting_the_oldest(tier, held, 0, 2 * CAP_BYTES // (4 * (32 << 10)) // 16 * 16, old)
        old_names = list(held)
        await write_evicting_the_oldest(tier, held, 10_000, 96, new)
        assert disk_usage_bytes(tmp_path) <= 1.05 * CAP_BYTES
        assert len((await read(tier, names_of(chain(10_000, 96, new)), new)).right) == 96
        assert tier.num_blocks == len(held)
        assert set(held) & set(old_names)


async def test_a_cap_lowered_between_runs_holds_from_the_start(tmp_path: Path) -> None:
    shape = (4, 32 << 10)
    large = msgspec.structs.replace(SETTINGS, cap_bytes=3 * CAP_BYTES)
    async with opened(tmp_path, large) as (tier, _):
        for start in range(0, 480, 16):
            assert all(await tier.write(chain(start, 16, shape)))
    assert disk_usage_bytes(tmp_path) > 1.5 * CAP_BYTES
    async with opened(tmp_path) as (tier, found):
        assert disk_usage_bytes(tmp_path) <= 1.05 * CAP_BYTES
        assert 0 < len(found) < 480
        assert not (await read(tier, names_of(found), shape)).missed
        assert tier.counts.num_lost_at_open == 480 - len(found)
        held = names_of(found)
        await write_evicting_the_oldest(tier, held, 1000, 160, shape)
        assert disk_usage_bytes(tmp_path) <= 1.05 * CAP_BYTES
