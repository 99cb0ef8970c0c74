"""One folder of blocks: RocksDB says where each lies, segment files hold the bytes. Blocking.

One thread opens, writes, removes, syncs and closes; one other may read meanwhile.
"""

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from libs.kv.checksum import checksum
from services.kv_store.disk.blocks import BlockToRead, BlockToWrite, DiskBlock, Shape
from services.kv_store.disk.counts import DiskCounts, ReadResult
from services.kv_store.disk.errors import FolderUnusable
from services.kv_store.disk.index import Index, IndexFailed
from services.kv_store.disk.index_recovery import (
    OpenedIndex,
    open_index,
    open_index_to_read,
    probe_writing,
)
from services.kv_store.disk.reconcile import Found, parents_first, reconcile
from services.kv_store.disk.record import Record
from services.kv_store.disk.segment_files import SegmentFiles, System
from services.kv_store.disk.settings import DiskSettings
from services.kv_store.disk.slot_map import Place, SlotMap


class Volume:
    """Raises OSError and IndexFailed where writing fails; then nothing of that call is held."""

    def __init__(self, folder: Path, settings: DiskSettings, counts: DiskCounts, system: System) -> None:
        self._folder, self._settings, self._counts = folder, settings, counts
        self._index_folder = settings.index_folder or folder / "index"
        self._segment_folder = folder / "segments"
        self._files = SegmentFiles(self._segment_folder, system)
        self.slots = self._empty_slots()
        self._index: Index | None = None
        self._owner: int | None = None
        self._next_order = 0
        self._owed: set[bytes] = set()
        """Removed, but the index could not be told yet."""
        self._owes_all = False
        self._reading = threading.Lock()

    def open(self) -> tuple[list[DiskBlock], bool]:
        """What is held, and whether it can be written to. What does not match is dropped and counted.

        Raises FolderUnusable.
        """
        try:
            for folder in (self._folder, self._segment_folder, self._index_folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._owner = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderUnusable(f"{self._folder} is in use by another store; give each its own") from error
        except OSError as error:
            raise FolderUnusable(f"{self._folder} for blocks on disk: {error}") from error
        try:
            return parents_first(self._open(open_index(self._index_folder, self._settings))), True
        except (OSError, IndexFailed):
            return self._open_to_read(), False

    def write(self, blocks: Sequence[BlockToWrite]) -> set[bytes]:
        """Names of those that are held now; the others did not fit under the cap."""
        self._settle()
        held: set[bytes] = set()
        by_shape: dict[Shape, dict[bytes, BlockToWrite]] = {}
        for block in blocks:
            by_shape.setdefault(block.shape, {})[block.name] = block
        for shape, group in by_shape.items():
            fitting = list(group.values())[: self.slots.num_allocatable(shape)]
            if fitting:
                self._write(shape, fitting)
                held.update(block.name for block in fitting)
        self._measure_index()
        return held

    def read(self, wanted: Sequence[BlockToRead], layers: range) -> list[ReadResult]:
        """Fill the rows; what is not whole and right is not READ."""
        with self._reading:
            if self._index is None or self._owes_all:
                return [ReadResult.MISSING] * len(wanted)
            records = self._index.get([block.name for block in wanted])
            if layers.start == 0:
                self._read_ahead(records)
            return [self._read(block, record, layers) for block, record in zip(wanted, records, strict=True)]

    def remove(self, names: Sequence[bytes]) -> None:
        """Forget these; unknown names are passed over. Where that fails they are owed, and not read again."""
        self._owed.update(names)
        self._settle()

    def clear(self) -> None:
        """Forget all. Where that fails it is owed."""
        self._owes_all = True
        self._settle()

    def sync(self) -> None:
        """Returns when all that was written is on the device."""
        self._files.sync()
        self._writable().sync()

    def try_again(self) -> None:
        """After a failed write: returns once writing works. The index may have been opened anew for it."""
        probe_writing(self._index_folder)
        probe_writing(self._segment_folder)
        try:
            self._writable().mark_end()
            self._settle()
            self.sync()
        except IndexFailed:
            self._reopen()
            self._settle()

    def close(self) -> None:
        """Keeps what is held for the next open. Does nothing where nothing is open."""
        try:
            if self._index is not None:
                self._index.close()
        finally:
            self._index = None
            self._files.close()
            if self._owner is not None:
                os.close(self._owner)
            self._owner = None

    def _open(self, opened: OpenedIndex, *, can_write: bool = True) -> dict[bytes, Record]:
        self._index = opened.index
        self._counts.num_index_repairs += opened.num_mended
        files = self._files.found()
        found = reconcile(opened.records, files, self._settings.cap_bytes)
        self._counts.num_lost_at_open += len(found.lost)
        self._owed.update(found.lost)
        self._restore(found, can_write)
        self._next_order = 1 + max((record.order for record in found.held.values()), default=0)
        self.slots.skip_to(1 + max(files, default=-1))
        self._measure_index()
        return found.held

    def _open_to_read(self) -> list[DiskBlock]:
        try:
            opened = open_index_to_read(self._index_folder, self._settings)
        except IndexFailed:
            return []
        return parents_first(self._open(opened, can_write=False))

    def _reopen(self) -> None:
        with self._reading:
            index, self._index = self._index, None
            if index is not None:
                with suppress(IndexFailed):
                    index.close()
            self._files.close()
            self.slots = self._empty_slots()
            self._open(open_index(self._index_folder, self._settings))

    def _restore(self, found: Found, can_write: bool) -> None:
        for number, (shape, taken) in found.slots().items():
            self._files.open(number, shape)
            self.slots.restore(number, shape, taken)
            if can_write:
                self._files.truncate(number, (max(taken) + 1) * shape[0] * shape[1])
        if can_write:
            for number, shape in found.unused.items():
                self._files.remove(number, shape)
            self._settle()

    def _settle(self) -> None:
        index = self._writable()
        if self._owes_all:
            index.clear()
            self._free_all()
            self._owed.clear()
            self._owes_all = False
        if self._owed:
            names = list(self._owed)
            records = index.get(names)
            index.remove(names)
            self._owed.difference_update(names)
            self._free((record.segment, record.slot) for record in records if record is not None)

    def _write(self, shape: Shape, blocks: Sequence[BlockToWrite]) -> None:
        index, names = self._writable(), [block.name for block in blocks]
        places = self.slots.allocate(len(blocks), shape)
        try:
            self._write_bytes(shape, blocks, places)
            before = index.get(names)
            index.put({b.name: self._record(b, place) for b, place in zip(blocks, places, strict=True)})
            if self._settings.fsync == "always":
                self._files.sync()
        except BaseException:
            # Part of it may be on disk, and an earlier block of the name; the caller is told that neither is.
            self._owed.update(names)
            self._free(places)
            raise
        self._free((record.segment, record.slot) for record in before if record is not None)

    def _write_bytes(self, shape: Shape, blocks: Sequence[BlockToWrite], places: Sequence[Place]) -> None:
        """Neighbouring slots in one go."""
        paired = zip(blocks, places, itertools.count(), strict=False)
        runs = itertools.groupby(paired, key=lambda item: (item[1][0], item[1][1] - item[2]))
        for (number, _), run in runs:
            items = list(run)
            if not self._files.is_open(number):
                self._files.open(number, shape)
            rows = [row for block, _, _ in items for row in block.layers]
            self._files.write(number, items[0][1][1] * shape[0] * shape[1], rows)

    def _record(self, block: BlockToWrite, place: Place) -> Record:
        self._next_order += 1
        return Record(
            *place, *block.shape, block.parent, self._next_order, time.time(), block.num_hits, block.checksums
        )

    def _read_ahead(self, records: Sequence[Record | None]) -> None:
        """All layers of these blocks are wanted soon, and the device is quickest when it knows."""
        for record in records:
            if record is not None:
                num_bytes = record.num_layers * record.layer_bytes
                self._files.will_read(record.segment, record.slot * num_bytes, num_bytes)

    def _read(self, block: BlockToRead, record: Record | None, layers: range) -> ReadResult:
        if record is None or block.name in self._owed or layers.stop > record.num_layers:
            return ReadResult.MISSING
        kept = record.checksums[layers.start : layers.stop]
        offset = (record.slot * record.num_layers + layers.start) * record.layer_bytes
        try:
            if not self._files.read(record.segment, offset, block.into):
                return ReadResult.MISSING
        except OSError:
            return ReadResult.FAILED
        for row, expected in zip(block.into, kept.tolist(), strict=True):
            if checksum(row) != expected:
                return ReadResult.CORRUPT
        if block.checksums is not None:
            block.checksums[:] = kept
        return ReadResult.READ

    def _free(self, places: Iterable[Place]) -> None:
        for number, shape in self.slots.free(places):
            self._files.remove(number, shape)

    def _free_all(self) -> None:
        segments = {number: segment.shape for number, segment in self.slots.segments.items()}
        for number, shape in segments.items():
            self.slots.drop(number)
            self._files.remove(number, shape)

    def _writable(self) -> Index:
        if self._index is None or not self._index.can_write:
            raise IndexFailed(f"{self._index_folder} is not open for writing")
        return self._index

    def _empty_slots(self) -> SlotMap:
        settings = self._settings
        return SlotMap(settings.cap_bytes, settings.segment_file_bytes, settings.write_buffer_bytes)

    def _measure_index(self) -> None:
        """Tell the slot map what RocksDB takes. It may be removing files meanwhile."""
        num_bytes = 0
        for path in self._index_folder.iterdir():
            with suppress(FileNotFoundError):
                num_bytes += path.stat().st_blocks * 512
        self.slots.num_index_bytes = num_bytes
