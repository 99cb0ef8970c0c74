"""Disks that are full, break or cannot be written: writes pause, reads go on, writes resume by themselves."""

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from disk_blocks import SETTINGS, chain, fill, name_of, names_of, opened, read

from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.disk.segment_files import SYSTEM, Rows

QUICK = msgspec.structs.replace(SETTINGS, retry_seconds=0.02)


class Faults:
    """The system, whose calls fail with `error` while it is set: all writes, and reads at `bad_offsets`."""

    def __init__(self) -> None:
        self.write_error: int | None = None
        self.sync_error: int | None = None
        self.bad_offsets: range = range(0)

    def pwritev(self, fd: int, buffers: Rows, offset: int, /) -> int:
        if self.write_error is not None:
            raise OSError(self.write_error, os.strerror(self.write_error))
        return SYSTEM.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Rows, offset: int, /) -> int:
        end = offset + sum(row.size for row in buffers)
        if offset < self.bad_offsets.stop and end > self.bad_offsets.start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return SYSTEM.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int, /) -> None:
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        SYSTEM.fdatasync(fd)


class ShortWrites(Faults):
    """Takes at most 1000 bytes at a time, as the system may."""

    def pwritev(self, fd: int, buffers: Rows, offset: int, /) -> int:
        return super().pwritev(fd, [buffers[0][:1000]], offset)


class Resumes:
    """Waits until writing works again."""

    def __init__(self) -> None:
        self._resumed = asyncio.Event()

    def __call__(self) -> None:
        self._resumed.set()

    async def wait_for(self, tier: DiskTier) -> None:
        async with asyncio.timeout(30):
            while tier.is_paused:
                self._resumed.clear()
                await self._resumed.wait()


@asynccontextmanager
async def running(
    folder: Path, faults: Faults | None = None, resumes: Resumes | None = None
) -> AsyncIterator[DiskTier]:
    tier = DiskTier(folder, QUICK, system=faults or SYSTEM)
    await tier.open()
    upkeep = asyncio.ensure_future(tier.run(resumes or Resumes()))
    try:
        yield tier
    finally:
        upkeep.cancel()
        await asyncio.wait([upkeep])
        await tier.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
async def test_a_failed_write_pauses_writing_until_it_works_again(tmp_path: Path, error: int) -> None:
    faults, resumes, blocks = Faults(), Resumes(), chain(0, 40)
    async with running(tmp_path, faults, resumes) as tier:
        assert all(await tier.write(blocks))
        faults.write_error = error
        assert await tier.write(chain(100, 40)) == [False] * 40
        assert tier.is_paused
        assert not tier.can_write(1, 6, 4096)
        assert not (await read(tier, names_of(blocks))).missed
        faults.write_error = None
        await resumes.wait_for(tier)
        assert all(await tier.write(chain(100, 40)))
        assert not (await read(tier, names_of(blocks + chain(100, 40)))).missed
        assert (tier.counts.num_pauses, tier.counts.num_write_errors) == (1, 1)
        assert tier.num_blocks == 80
    async with opened(tmp_path) as (_, held):
        assert len(held) == 80


async def test_a_write_that_fails_leaves_no_older_block_of_its_name(tmp_path: Path) -> None:
    faults, resumes, blocks = Faults(), Resumes(), chain(0, 4)
    async with running(tmp_path, faults, resumes) as tier:
        await tier.write(blocks)
        faults.write_error = errno.EIO
        assert await tier.write(blocks[:2]) == [False, False]
        assert (await read(tier, names_of(blocks))).right == names_of(blocks[2:])
        faults.write_error = None
        await resumes.wait_for(tier)
        assert tier.num_blocks == 2
    async with opened(tmp_path) as (_, held):
        assert sorted(names_of(held)) == sorted(names_of(blocks[2:]))


async def test_a_failed_flush_pauses_writing(tmp_path: Path) -> None:
    faults = Faults()
    settings = msgspec.structs.replace(QUICK, fsync="always")
    tier = DiskTier(tmp_path, settings, system=faults)
    await tier.open()
    faults.sync_error = errno.EIO
    assert await tier.write(chain(0, 4)) == [False] * 4
    assert tier.is_paused
    assert (await read(tier, names_of(chain(0, 4)))).right == []
    await tier.close()


async def test_writes_that_the_system_takes_in_pieces_are_whole(tmp_path: Path) -> None:
    async with running(tmp_path, ShortWrites()) as tier:
        assert all(await tier.write(chain(0, 5)))
        assert not (await read(tier, names_of(chain(0, 5)))).missed


async def test_a_bad_place_on_the_device_costs_its_block_alone(tmp_path: Path) -> None:
    faults, blocks = Faults(), chain(0, 32)
    async with running(tmp_path, faults) as tier:
        await tier.write(blocks)
        faults.bad_offsets = range(5 * 4096 + 10, 5 * 4096 + 20)
        answer = await read(tier, names_of(blocks))
        assert answer.missed == [blocks[5].name]
        assert tier.counts.num_failed == 1
        assert tier.num_blocks == 31
        faults.bad_offsets = range(0)
        assert (await read(tier, [blocks[5].name])).missed == [blocks[5].name]


async def test_a_device_that_reads_nothing_gives_misses_only(tmp_path: Path) -> None:
    faults, blocks = Faults(), chain(0, 32)
    async with running(tmp_path, faults) as tier:
        await tier.write(blocks)
        faults.bad_offsets = range(1 << 40)
        assert len((await read(tier, names_of(blocks))).missed) == tier.counts.num_failed == 32


async def test_removes_while_the_index_cannot_be_written_are_kept_and_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.kv_store.disk.index import Index, IndexFailed

    def fail(*_: object) -> None:
        raise IndexFailed("no room")

    resumes, blocks = Resumes(), chain(0, 8)
    async with running(tmp_path, None, resumes) as tier:
        await tier.write(blocks)
        with monkeypatch.context() as patched:
            patched.setattr(Index, "_write", fail)
            await tier.remove(names_of(blocks[:3]))
            assert tier.is_paused
            assert (await read(tier, names_of(blocks))).right == names_of(blocks[3:])
        await resumes.wait_for(tier)
        assert tier.num_blocks == 5
    async with opened(tmp_path) as (_, held):
        assert sorted(names_of(held)) == sorted(names_of(blocks[3:]))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def take_all_room(folder: Path) -> Path:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017  # it always ends so
    return ballast


async def test_a_disk_that_fills_up_pauses_writes_and_room_resumes_them(small_disk: Path) -> None:
    resumes = Resumes()
    async with running(small_disk / "kv", None, resumes) as tier:
        written: list[bytes] = []
        for start in range(0, 2000, 40):
            batch = chain(start, 40)
            if not all(await tier.write(batch)):
                break
            written += names_of(batch)
        assert tier.is_paused
        assert not (await read(tier, written)).missed
        await tier.remove(written[:400])
        await resumes.wait_for(tier)
        assert all(await tier.write(chain(5000, 40)))
        assert not (await read(tier, written[400:] + names_of(chain(5000, 40)))).missed
    async with opened(small_disk / "kv") as (tier, held):
        assert len(held) == len(written) - 400 + 40
        assert not (await read(tier, names_of(held))).missed


async def test_a_foreign_file_that_takes_all_room_and_goes_again(small_disk: Path) -> None:
    resumes, blocks = Resumes(), chain(0, 100)
    async with running(small_disk / "kv", None, resumes) as tier:
        await tier.write(blocks)
        ballast = take_all_room(small_disk)
        for start in range(1000, 2000, 20):
            if not all(await tier.write(chain(start, 20))):
                break
        assert tier.is_paused
        assert not (await read(tier, names_of(blocks))).missed
        assert tier.is_paused
        ballast.unlink()
        await resumes.wait_for(tier)
        assert all(await tier.write(chain(5000, 40)))
    async with opened(small_disk / "kv") as (tier, held):
        assert {*names_of(blocks), *names_of(chain(5000, 40))} <= set(names_of(held))


async def test_a_start_on_a_full_disk_drops_what_cannot_be_opened_and_fills_again(small_disk: Path) -> None:
    blocks = chain(0, 100)
    await fill(small_disk / "kv", blocks)
    ballast = take_all_room(small_disk)
    resumes = Resumes()
    async with running(small_disk / "kv", None, resumes) as tier:
        answer = await read(tier, names_of(blocks))
        assert len(answer.right) == tier.num_blocks
        assert tier.counts.num_index_drops == 0 or not answer.right  # RocksDB may have found a last page
        ballast.unlink()
        if tier.is_paused:
            await resumes.wait_for(tier)
        assert all(await tier.write(chain(1000, 5)))
        assert not (await read(tier, answer.right + names_of(chain(1000, 5)))).missed
    async with opened(small_disk / "kv") as (_, held):
        assert set(names_of(held)) == {*answer.right, *names_of(chain(1000, 5))}


async def test_a_first_start_on_a_full_disk_waits_for_room(small_disk: Path) -> None:
    for folder in ("kv", "kv/index", "kv/segments"):
        (small_disk / folder).mkdir()
    ballast = take_all_room(small_disk)
    resumes = Resumes()
    async with running(small_disk / "kv", None, resumes) as tier:
        assert tier.is_paused
        assert (await read(tier, [name_of(0)])).missed == [name_of(0)]
        ballast.unlink()
        await resumes.wait_for(tier)
        assert all(await tier.write(chain(0, 5)))


async def test_a_folder_that_may_only_be_read_is_empty_and_paused_until_it_may_be_written(
    small_disk: Path,
) -> None:
    blocks, resumes = chain(0, 50), Resumes()
    await fill(small_disk / "kv", blocks)
    remount(small_disk, "ro")
    async with running(small_disk / "kv", None, resumes) as tier:
        assert tier.is_paused
        assert tier.num_blocks == len((await read(tier, names_of(blocks))).right) == 0
        remount(small_disk, "rw")
        await resumes.wait_for(tier)
        assert tier.num_blocks == 0
        assert all(await tier.write(chain(1000, 5)))
        assert not (await read(tier, names_of(chain(1000, 5)))).missed


async def test_an_index_that_fails_between_opening_and_first_write_is_read_until_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.kv_store.disk.index import Index, IndexFailed

    def fail(*_: object) -> None:
        raise IndexFailed("no room")

    resumes, blocks = Resumes(), chain(0, 8)
    await fill(tmp_path, blocks)
    with monkeypatch.context() as patched:
        patched.setattr(Index, "mark_end", fail)
        tier = DiskTier(tmp_path, QUICK)
        assert len(await tier.open()) == tier.num_blocks == 8
    assert tier.is_paused
    upkeep = asyncio.ensure_future(tier.run(resumes))
    assert not (await read(tier, names_of(blocks))).missed
    await resumes.wait_for(tier)
    assert all(await tier.write(chain(100, 8)))
    assert tier.num_blocks == 16
    assert not (await read(tier, names_of(blocks + chain(100, 8)))).missed
    upkeep.cancel()
    await asyncio.wait([upkeep])
    await tier.close()
