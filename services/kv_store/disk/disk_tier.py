"""The tier on disk as the store's event loop sees it.

Life: `await open()` tells what is held; the owner spawns `run()`, which flushes and resumes after a pause;
then writes, reads and removes; `await close()`.

A block that is missing, damaged or cannot be read is False from `read`, counted and removed here. Errors of
writing pause the tier: every write is then False at once, reads go on, and `run` probes until writing works.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TypeVar

import structlog

from services.kv_store.disk.blocks import BlockToRead, BlockToWrite, DiskBlock, ReadResult
from services.kv_store.disk.index import IndexFailed
from services.kv_store.disk.layout import MAX_STRIPE_SLOTS
from services.kv_store.disk.segment_files import SYSTEM, System
from services.kv_store.disk.settings import DiskSettings
from services.kv_store.disk.volume import DiskCounts, Volume

log = structlog.get_logger()
SMALLEST_PART_BYTES = 1 << 20
"""Handing work to a thread costs about as much as reading a tenth of this."""

T = TypeVar("T")


class DiskTier:
    """Blocks in `folder`, whose files stay within `settings.cap_bytes`."""

    def __init__(
        self,
        folder: Path,
        settings: DiskSettings,
        *,
        system: System = SYSTEM,
    ) -> None:
        self._settings = settings
        self.counts = DiskCounts()
        self._volume = Volume(folder, settings, self.counts, system)
        self._writer = ThreadPoolExecutor(1, "disk-write")
        self._readers = ThreadPoolExecutor(settings.num_read_threads, "disk-read")
        self._num_pending_bytes = 0
        self._paused = asyncio.Event()
        self._written = asyncio.Event()

    @property
    def cap_bytes(self) -> int:
        """What segments and index may take together."""
        return self._settings.cap_bytes

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the blocks held."""
        return self._volume.slots.num_used_bytes

    @property
    def num_file_bytes(self) -> int:
        """Bytes of the files: blocks held, free slots between them, and the index."""
        return self._volume.slots.num_file_bytes + self._volume.slots.num_index_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return self._volume.slots.num_blocks

    @property
    def is_paused(self) -> bool:
        """Writing failed and has not worked since."""
        return self._paused.is_set()

    async def open(self) -> list[DiskBlock]:
        """All that is held, parents before their children; a parent may be missing. Raises FolderUnusable."""
        blocks, can_write = await self._in(self._writer, self._volume.open)
        if not can_write:
            self._pause("cannot be written to")
        return blocks

    def can_write(self, num_blocks: int, num_layers: int, layer_bytes: int) -> bool:
        """Whether a write of these blocks would be taken now; if not, remove others first."""
        if self.is_paused:
            return False
        shape = num_layers, layer_bytes
        num_pending = -(-self._num_pending_bytes // (num_layers * layer_bytes))
        fits_queue = self._num_pending_bytes <= self._settings.max_pending_write_bytes
        return fits_queue and self._volume.slots.num_allocatable(shape) >= num_blocks + num_pending

    async def write(self, blocks: Sequence[BlockToWrite]) -> list[bool]:
        """Whether each is held now. Nothing is raised for what the disk does."""
        num_bytes = sum(len(block.layers) * block.layers[0].size for block in blocks)
        if self.is_paused or self._num_pending_bytes > self._settings.max_pending_write_bytes:
            return [False] * len(blocks)
        self._num_pending_bytes += num_bytes
        try:
            held = await self._in(self._writer, self._volume.write, blocks)
        except (OSError, IndexFailed) as error:
            self._pause(error)
            return [False] * len(blocks)
        finally:
            self._num_pending_bytes -= num_bytes
        self._written.set()
        self.counts.num_written += len(held)
        return [block.name in held for block in blocks]

    async def read(self, wanted: Sequence[BlockToRead], layers: range) -> list[bool]:
        """Fill the rows with these layers of each block. False: not to be had, and no longer held; the rows
        then hold anything. Rows are the reader's until this returns."""
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(self._in(self._readers, self._volume.read, part, layers))
                for part in self._parts(wanted)
            ]
        results = [result for read in reads for result in read.result()[0]]
        self._count(results)
        bad = {name: spot for read in reads for name, spot in read.result()[1].items()}
        if bad:
            await self._change(self._volume.give_up, bad)
        return [result is ReadResult.READ for result in results]

    async def remove(self, names: Sequence[bytes]) -> None:
        """Forget these. Unknown names are passed over."""
        await self._change(self._volume.remove, names)

    async def run(self, on_resumed: Callable[[], None]) -> NoReturn:
        """Flushes as the policy says, and while paused looks whether writing works again: `on_resumed`."""
        async with asyncio.TaskGroup() as tasks:
            if self._settings.fsync == "interval":
                tasks.create_task(self._flush_at_intervals())
            await self._resume_after_pauses(on_resumed)

    async def close(self) -> None:
        """After the last call has returned, or `open` has failed. Keeps what is held."""
        try:
            await self._in(self._writer, self._volume.close)
        except (OSError, IndexFailed) as error:
            log.warning("disk_close_failed", error=str(error))
        finally:
            self._readers.shutdown()
            self._writer.shutdown()

    async def _flush_at_intervals(self) -> NoReturn:
        while True:
            await self._written.wait()
            await asyncio.sleep(self._settings.fsync_interval_seconds)
            self._written.clear()
            try:
                await self._in(self._writer, self._volume.sync)
            except (OSError, IndexFailed) as error:
                self._pause(error)

    async def _resume_after_pauses(self, on_resumed: Callable[[], None]) -> NoReturn:
        while True:
            await self._paused.wait()
            await asyncio.sleep(self._settings.retry_seconds)
            try:
                await self._in(self._writer, self._volume.try_again)
            except (OSError, IndexFailed) as error:
                log.debug("disk_writes_still_fail", error=str(error))
            else:
                log.info("disk_writes_resumed")
                self._paused.clear()
                on_resumed()

    def _parts(self, wanted: Sequence[BlockToRead]) -> list[Sequence[BlockToRead]]:
        """For each thread one, where it is worth it."""
        num_bytes = len(wanted) * len(wanted[0].into) * wanted[0].into[0].size if wanted else 0
        num_parts = max(1, min(self._settings.num_read_threads, num_bytes // SMALLEST_PART_BYTES))
        step = max(1, -(-len(wanted) // (num_parts * MAX_STRIPE_SLOTS))) * MAX_STRIPE_SLOTS
        return [wanted[start : start + step] for start in range(0, len(wanted), step)]

    def _count(self, results: Sequence[ReadResult]) -> None:
        counts = self.counts
        counts.num_read += results.count(ReadResult.READ)
        counts.num_missing += results.count(ReadResult.MISSING)
        counts.num_corrupt += results.count(ReadResult.CORRUPT)
        counts.num_failed += results.count(ReadResult.FAILED)

    def _pause(self, error: Exception | str) -> None:
        self.counts.num_write_errors += 1
        if not self.is_paused:
            log.warning("disk_writes_paused", error=str(error))
            self.counts.num_pauses += 1
            self._paused.set()

    async def _change(self, change: Callable[..., None], *args: object) -> None:
        """What cannot be done now is done before the next write."""
        try:
            await self._in(self._writer, change, *args)
        except (OSError, IndexFailed) as error:
            self._pause(error)

    async def _in(self, thread: ThreadPoolExecutor, call: Callable[..., T], *args: object) -> T:
        """A thread that was given memory is waited for even when the caller is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(thread, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            raise
