"""The pool's memory: given up, taken back, grown."""

import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.errors import NoRoom, OutOfBlocks
from libs.engine.memory.arena import Arena, Region
from libs.engine.memory.pool import BlockLayout, Pool

CPU = torch.device("cpu")
LAYOUT = BlockLayout(((0, 0), (1, 0)), block_size=2, head_dim=2, dtype=torch.float32)
HALF = BlockLayout(((0, 0),), block_size=2, head_dim=2, dtype=torch.float32)
BLOCK = LAYOUT.block_bytes


def test_memory_is_given_up_behind_the_blocks_only() -> None:
    pool = Pool(LAYOUT, 10, CPU)
    with pytest.raises(NoRoom):
        pool.give_up(BLOCK)
    pool.relayout(LAYOUT, {1}, num_blocks=6)
    assert pool.num_blocks == 6
    region = pool.give_up(4 * BLOCK)
    assert region.memory.shape == (4 * BLOCK,)
    assert (pool.capacity(LAYOUT), pool.capacity(HALF)) == (6, 12)
    with pytest.raises(NoRoom):
        pool.give_up(1)


def test_what_is_taken_back_becomes_blocks_again() -> None:
    pool = Pool(LAYOUT, 10, CPU)
    pool.relayout(LAYOUT, set(), num_blocks=6)
    region = pool.give_up(3 * BLOCK)
    assert pool.capacity(LAYOUT, num_given_up_bytes=BLOCK) == 6
    pool.take_back(region)
    pool.take_back(region)
    assert pool.relayout(LAYOUT, set()).num_blocks_after == 10


def test_fewer_blocks_of_the_same_layout_move_live_ones_below() -> None:
    pool = Pool(LAYOUT, 10, CPU)
    for block in (2, 8, 9):
        pool.blocks[block] = float(block)
    told = pool.relayout(LAYOUT, {2, 8, 9}, num_blocks=3)
    assert set(told.moved) == {8, 9}
    assert set(told.moved.values()) == {0, 1}
    assert sorted(pool.blocks.amax((1, 2, 3, 4)).tolist()) == [2.0, 8.0, 9.0]
    with pytest.raises(OutOfBlocks):
        pool.relayout(LAYOUT, {0, 1, 2}, num_blocks=2)


def test_a_change_of_layout_may_leave_memory_over() -> None:
    pool = Pool(LAYOUT, 10, CPU)
    pool.blocks[4] = 4.0
    assert pool.relayout(HALF, {4}, num_blocks=11).num_blocks_after == 11
    assert bool((pool.layer(0)[4] == 4.0).all())
    pool.give_up(20 * BLOCK - 11 * HALF.block_bytes - 10 * BLOCK)


def test_a_pool_grows_into_the_space_that_was_reserved() -> None:
    pool = Pool(LAYOUT, 10, CPU, max_bytes=14 * BLOCK)
    pool.blocks[9] = 9.0
    assert pool.grow(3 * BLOCK) == 3 * BLOCK
    assert pool.relayout(LAYOUT, {9}).num_blocks_after == 13
    assert bool((pool.blocks[9] == 9.0).all())
    pool.blocks[12] = 12.0
    assert pool.grow(3 * BLOCK) == BLOCK
    with pytest.raises(NoRoom):
        pool.shrink(2 * BLOCK)
    pool.relayout(LAYOUT, {9}, num_blocks=10)
    pool.shrink(4 * BLOCK)
    assert pool.capacity(LAYOUT) == 10


def test_a_pool_without_reserved_space_does_not_grow() -> None:
    pool = Pool(LAYOUT, 10, CPU)
    assert pool.grow(BLOCK) == 0
    assert pool.capacity(LAYOUT) == 10


def test_touching_changes_nothing() -> None:
    pool = Pool(LAYOUT, 1000, CPU)
    pool.relayout(LAYOUT, set(), num_blocks=500)
    pool.blocks.fill_(7.0)
    region = pool.give_up(BLOCK * 400)
    region.memory.fill_(3)
    pool.touch_own()
    pool.touch(region, region.num_bytes)
    assert bool((pool.blocks == 7.0).all())
    assert bool((region.memory == 3).all())


def test_memory_that_comes_back_is_clean() -> None:
    """Unwritten KV must be finite: its weight in attention is zero, but zero times NaN is not."""
    pool = Pool(LAYOUT, 1000, CPU)
    pool.relayout(LAYOUT, set(), num_blocks=500)
    region = pool.give_up(500 * BLOCK)
    region.memory.fill_(0xFF)
    pool.take_back(region)
    pool.relayout(LAYOUT, set())
    assert bool(pool.blocks.isfinite().all())
    pool.relayout(LAYOUT, set(), num_blocks=500)
    assert bool(pool.give_up(500 * BLOCK).memory.view(torch.float32).isfinite().all())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it in /proc")
def test_memory_that_nobody_uses_is_free_for_the_machine() -> None:
    wide = BlockLayout(((0, 0), (1, 0)), block_size=16, head_dim=64, dtype=torch.float32)
    num_bytes = 64 << 20
    before = resident_bytes()
    pool = Pool(wide, num_bytes // wide.block_bytes, CPU, max_bytes=4 * num_bytes)
    whole = resident_bytes()
    assert whole - before >= num_bytes * 0.9
    pool.relayout(wide, set(), num_blocks=pool.num_blocks // 4)
    region = pool.give_up(num_bytes // 2)
    assert resident_bytes() <= whole - num_bytes * 0.6
    region.memory.fill_(1)
    pool.take_back(region)
    assert resident_bytes() <= whole - num_bytes * 0.6
    pool.relayout(wide, set())
    pool.touch_own()
    assert resident_bytes() >= whole - num_bytes * 0.1


@given(data=st.data())
def test_on_a_device_regions_lie_apart_behind_the_blocks_and_no_more_is_used_than_there_is(
    data: st.DataObject,
) -> None:
    """There memory is one piece, with holes between regions. The meta device counts as others do."""
    num_bytes = data.draw(st.integers(1 << 10, 1 << 16))
    arena = Arena(num_bytes, torch.device("meta"), max_bytes=num_bytes * 2)
    assert arena.grow(1000) == 0
    regions: list[Region] = []
    used = data.draw(st.integers(0, num_bytes // 2))
    for _ in range(data.draw(st.integers(1, 20))):
        if data.draw(st.booleans()) and regions:
            arena.take_back(regions.pop(data.draw(st.integers(0, len(regions) - 1))))
        else:
            wanted = data.draw(st.integers(1, num_bytes // 2))
            left = arena.own_bytes_after(wanted)
            if left >= used:
                regions.append(arena.give_up(wanted, used))
                assert arena.own_bytes == left
            else:
                with pytest.raises(NoRoom):
                    arena.give_up(wanted, used)
        ordered = sorted(regions, key=lambda region: region.first_byte)
        edges = [
            used,
            *(edge for region in ordered for edge in (region.first_byte, region.end_byte)),
            num_bytes,
        ]
        assert edges == sorted(edges)
        assert arena.own_bytes >= used
        assert all(region.first_byte % 256 == 0 for region in regions)
    for region in regions:
        arena.take_back(region)
    assert arena.own_bytes == num_bytes


@given(data=st.data())
def test_regions_and_blocks_never_overlap_however_they_come_and_go(data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, 40))
    pool = Pool(LAYOUT, num_blocks, CPU, max_bytes=num_blocks * 2 * BLOCK)
    regions: list[tuple[int, Region]] = []
    total = num_blocks * BLOCK
    for number in range(1, data.draw(st.integers(2, 25))):
        match data.draw(st.sampled_from(["give", "take", "fit", "grow"])):
            case "give":
                num_bytes = data.draw(st.integers(1, num_blocks * BLOCK))
                left = pool.capacity(LAYOUT, num_given_up_bytes=num_bytes)
                if pool.num_blocks <= left:
                    regions.append((number, pool.give_up(num_bytes)))
                    regions[-1][1].memory.fill_(number)
                else:
                    with pytest.raises(NoRoom):
                        pool.give_up(num_bytes)
            case "take" if regions:
                pool.take_back(regions.pop(data.draw(st.integers(0, len(regions) - 1)))[1])
            case "fit":
                pool.relayout(LAYOUT, set(), num_blocks=data.draw(st.integers(1, num_blocks * 2)))
            case "grow":
                total += pool.grow(data.draw(st.integers(1, 2 * BLOCK)))
        pool.blocks.fill_(-1.0)
        assert all(bool((one.memory == fill).all()) for fill, one in regions)
        given_up = sum(one.num_bytes for _, one in regions)
        assert pool.num_given_up_bytes == given_up
        assert pool.num_blocks * BLOCK + given_up <= total
        assert pool.capacity(LAYOUT) == (total - given_up) // BLOCK
    for _, one in regions:
        pool.take_back(one)
    assert pool.relayout(LAYOUT, set()).num_blocks_after == total // BLOCK
