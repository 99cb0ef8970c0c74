"""Files changed between stop and start, and under a running tier: counted misses, never wrong bytes."""

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from disk_blocks import SETTINGS, SHAPE, block, chain, fill, name_of, names_of, opened, read
from structlog.testing import capture_logs

Change = Callable[[Path], None]

NUM_BLOCKS = 400
SETTINGS_OF_SMALL_FILES = msgspec.structs.replace(
    SETTINGS, segment_bytes=64 * SHAPE[0] * SHAPE[1], index_write_buffer_bytes=64 << 10
)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(os.urandom(5000))


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 0xFF
    path.write_bytes(body)


def delete(path: Path) -> None:
    path.unlink()


CHANGES = [truncate, empty, zero, append, flip, delete]


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


async def check_that_later_writes_work(folder: Path, expected_held: set[bytes]) -> None:
    """Now, and after one more restart, which finds what this one held and all that it wrote."""
    later = chain(10_000, 300)
    async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, _):
        assert all(await tier.write(later))
        assert not (await read(tier, names_of(later))).missed
        assert not tier.is_paused
    async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, held):
        assert set(names_of(held)) == expected_held | set(names_of(later))
        assert not (await read(tier, names_of(held))).missed


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_segment_costs_counted_misses_of_its_own_blocks(
    tmp_path: Path, change: Change
) -> None:
    blocks = chain(0, NUM_BLOCKS)
    await fill(tmp_path, blocks, SETTINGS_OF_SMALL_FILES)
    change(segments(tmp_path)[2])
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, held):
        answer = await read(tier, names_of(blocks))
        counts = tier.counts
        num_bad = counts.num_missing + counts.num_corrupt
        assert num_bad == len(answer.missed) <= 64
        assert set(names_of(held)) >= set(answer.right)
        assert counts.num_lost_at_open + counts.num_corrupt == len(answer.missed)
        assert (len(answer.missed) > 0) == (change is not append)
        assert tier.num_blocks == len(answer.right)
    await check_that_later_writes_work(tmp_path, set(answer.right))


async def test_a_flipped_byte_in_a_segment_costs_one_block(tmp_path: Path) -> None:
    blocks = chain(0, NUM_BLOCKS)
    await fill(tmp_path, blocks, SETTINGS_OF_SMALL_FILES)
    flip(segments(tmp_path)[1])
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, _):
        assert len((await read(tier, names_of(blocks))).missed) == tier.counts.num_corrupt == 1


async def test_two_swapped_segments_are_misses(tmp_path: Path) -> None:
    blocks = chain(0, NUM_BLOCKS)
    await fill(tmp_path, blocks, SETTINGS_OF_SMALL_FILES)
    first, second = segments(tmp_path)[:2]
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, _):
        answer = await read(tier, names_of(blocks))
        assert len(answer.missed) == tier.counts.num_corrupt == 128
    await check_that_later_writes_work(tmp_path, set(answer.right))


async def test_all_segments_deleted_is_an_empty_tier(tmp_path: Path) -> None:
    await fill(tmp_path, chain(0, NUM_BLOCKS), SETTINGS_OF_SMALL_FILES)
    shutil.rmtree(tmp_path / "segments")
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, held):
        assert (held, tier.num_blocks, tier.counts.num_lost_at_open) == ([], 0, NUM_BLOCKS)
    await check_that_later_writes_work(tmp_path, set())


async def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    await fill(tmp_path, chain(0, 10))
    (tmp_path / "segments" / "notes.txt").write_text("mine")
    async with opened(tmp_path) as (tier, _):
        assert not (await read(tier, names_of(chain(0, 10)))).missed
    assert (tmp_path / "segments" / "notes.txt").read_text() == "mine"


WIDE = (40, 64)
WIDE_BLOCKS = chain(0, 800, WIDE)
WIDE_NAMES = names_of(WIDE_BLOCKS)


async def fill_in_many_files(folder: Path) -> None:
    """Enough writes and restarts that RocksDB has tables, a log and a manifest with history."""
    for start in range(0, len(WIDE_BLOCKS), 200):
        async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, _):
            for first in range(start, start + 200, 20):
                assert all(await tier.write(WIDE_BLOCKS[first : first + 20]))


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    asyncio.run(fill_in_many_files(folder))
    return folder


@pytest.fixture
def folder(many_files: Path, tmp_path: Path) -> Path:
    """A copy of a tier with all WIDE_BLOCKS."""
    shutil.copytree(many_files, tmp_path / "copy")
    return tmp_path / "copy"


def index_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in (folder / "index").glob(pattern) if path.stat().st_size)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "pattern", ["*.sst", "*.log", "MANIFEST*", "CURRENT", "OPTIONS*", "IDENTITY", "rocksdict-config.json"]
)
async def test_a_damaged_index_costs_blocks_and_the_tier_fills_again(
    folder: Path, pattern: str, change: Change
) -> None:
    for path in index_files(folder, pattern)[:1]:
        change(path)
    async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, held):
        answer = await read(tier, WIDE_NAMES, WIDE)
        assert sorted(answer.right) == sorted(names_of(held))
        assert not tier.is_paused
        assert len(answer.missed) == tier.counts.num_missing
        assert tier.counts.num_index_drops == 0 or not held
        if pattern in ("OPTIONS*", "IDENTITY", "rocksdict-config.json"):
            assert not answer.missed
        assert all(await tier.write(chain(10_000, 300)))
    async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, held):
        assert set(names_of(held)) == set(answer.right) | set(names_of(chain(10_000, 300)))
        assert tier.counts.num_index_drops == 0


def flip_table(folder: Path) -> None:
    flip(max(index_files(folder, "*.sst"), key=lambda path: path.stat().st_size))


def write_rubbish(folder: Path) -> None:
    for path in index_files(folder, "*"):
        path.write_bytes(os.urandom(3000))


@pytest.mark.parametrize("damage", [flip_table, write_rubbish])
async def test_an_index_that_cannot_be_listed_whole_is_dropped_with_an_error_in_the_log(
    folder: Path, damage: Change
) -> None:
    damage(folder)
    with capture_logs() as logs:
        async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, held):
            assert (held, tier.num_blocks, tier.counts.num_index_drops) == ([], 0, 1)
            assert segments(folder) == []
    assert [entry["log_level"] for entry in logs if entry["event"] == "disk_index_dropped"] == ["error"]
    await check_that_later_writes_work(folder, set())


async def test_an_index_deleted_whole_leaves_no_segment_behind(tmp_path: Path) -> None:
    await fill(tmp_path, chain(0, NUM_BLOCKS), SETTINGS_OF_SMALL_FILES)
    shutil.rmtree(tmp_path / "index")
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, held):
        assert (held, tier.num_blocks) == ([], 0)
    assert segments(tmp_path) == []
    await check_that_later_writes_work(tmp_path, set())


async def test_segments_that_cannot_be_opened_are_counted_while_running_and_at_a_start(
    tmp_path: Path,
) -> None:
    blocks = chain(0, NUM_BLOCKS)
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, _):
        assert all(await tier.write(blocks))
        first, second = segments(tmp_path)[:2]
        first.unlink()
        first.symlink_to(first)
        answer = await read(tier, names_of(blocks))
        assert len(answer.missed) == tier.counts.num_failed == 64
    second.unlink()
    second.mkdir()
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, held):
        assert len(held) == tier.num_blocks == NUM_BLOCKS - 128
        assert tier.counts.num_lost_at_open == 64
    await check_that_later_writes_work(tmp_path, set(names_of(held)))


@pytest.mark.parametrize("change", [truncate, empty, zero, flip])
async def test_a_segment_damaged_under_a_running_tier_is_a_counted_miss(
    tmp_path: Path, change: Change
) -> None:
    blocks = chain(0, 40)
    async with opened(tmp_path, SETTINGS_OF_SMALL_FILES) as (tier, _):
        assert all(await tier.write(blocks))
        with segments(tmp_path)[0].open("r+b") as file:
            change_in_place(file.fileno(), change)
        answer = await read(tier, names_of(blocks))
        assert len(answer.missed) == tier.counts.num_corrupt + tier.counts.num_missing > 0
        assert all(await tier.write([block(name) for name in answer.missed]))
        assert not (await read(tier, names_of(blocks))).missed


def change_in_place(fd: int, change: Change) -> None:
    """On the inode that the tier has open."""
    change(Path(f"/proc/self/fd/{fd}"))


async def test_an_index_table_damaged_under_a_running_tier_gives_misses_and_writing_goes_on(
    folder: Path,
) -> None:
    async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, _):
        table = max(index_files(folder, "*.sst"), key=lambda path: path.stat().st_size)
        with table.open("r+b") as file:
            file.write(os.urandom(table.stat().st_size // 2))
        answer = await read(tier, WIDE_NAMES, WIDE)
        assert len(answer.missed) == tier.counts.num_missing
        assert all(await tier.write([block(name_of(5000), shape=WIDE)]))
    async with opened(folder, SETTINGS_OF_SMALL_FILES) as (tier, held):
        assert (held, tier.counts.num_index_drops) == ([], 1)
    await check_that_later_writes_work(folder, set())
