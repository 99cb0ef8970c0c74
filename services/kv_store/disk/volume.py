"""One folder of blocks: RocksDB says where each lies, segment files hold the bytes. Blocking.

One thread opens, writes, removes, syncs and closes; others may read meanwhile.
"""

import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import structlog

from services.kv_store.disk.block_bytes import read_blocks, write_blocks
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
from services.kv_store.disk.layout import Place, Spot
from services.kv_store.disk.reconcile import Found, parents_first, reconcile
from services.kv_store.disk.record import Record
from services.kv_store.disk.segment_files import SegmentFiles, System
from services.kv_store.disk.settings import DiskSettings
from services.kv_store.disk.slot_map import SlotMap

log = structlog.get_logger()


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
        try:
            for shape, group in by_shape.items():
                fitting = list(group.values())[: self.slots.num_allocatable(shape)]
                if fitting:
                    self._write(shape, fitting)
                    held.update(block.name for block in fitting)
        except BaseException:
            # Part of it may be on disk, and earlier blocks of these names; the caller is told that none is.
            self._owed.update(block.name for block in blocks)
            raise
        self._measure_index()
        return held

    def read(
        self, wanted: Sequence[BlockToRead], layers: range
    ) -> tuple[list[ReadResult], dict[bytes, Spot]]:
        """Fill the rows; what is not whole and right is not READ. With it the spots to `give_up`."""
        index = self._index
        results = [ReadResult.MISSING] * len(wanted)
        if index is None or self._owes_all:
            return results, {}
        kept = index.get([block.name for block in wanted])
        known = [(at, wanted[at], record) for at, record in enumerate(kept) if record is not None]
        readable = [(at, block, record) for at, block, record in known if self._fits(block, record, layers)]
        blocks, records = [block for _, block, _ in readable], [record for _, _, record in readable]
        found = read_blocks(self._files, blocks, records, layers)
        for (at, block, record), result in zip(readable, found, strict=True):
            results[at] = result
            if block.checksums is not None:
                block.checksums[:] = record.checksums[layers.start : layers.stop]
        bad = {block.name: record.spot for at, block, record in known if results[at] is not ReadResult.READ}
        if bad:
            bad = self._still_there(bad)
            for at, block, _ in readable:
                if results[at] is ReadResult.CORRUPT and block.name not in bad:
                    results[at] = ReadResult.MISSING  # it was removed while it was read
        return results, bad

    def give_up(self, spots: Mapping[bytes, Spot]) -> None:
        """Remove these, unless they were written anew elsewhere meanwhile."""
        self.remove(list(self._still_there(spots)))

    def remove(self, names: Sequence[bytes]) -> None:
        """Forget these; unknown names are passed over. Where that fails they are owed, and not read again."""
        self._owed.update(names)
        try:
            self._settle()
        except IndexFailed:
            self._make_room()
            raise

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
        probe_writing(self._index_folder, self._settings.probe_bytes)
        probe_writing(self._segment_folder, self._settings.probe_bytes)
        try:
            self._writable().mark_end()
            self._settle()
            self.sync()
        except IndexFailed:
            self._reopen()
            self._settle()

    def close(self) -> None:
        """Keeps what is held for the next open. Does nothing where nothing is open."""
        index, self._index = self._index, None
        with ExitStack() as last_steps:
            if self._owner is not None:
                last_steps.callback(os.close, self._owner)
            last_steps.callback(self._files.close)
            if index is not None:
                last_steps.callback(index.close)
                if self._settings.fsync != "off" and index.can_write:
                    self._files.sync()
                    index.sync()

    def _open(self, opened: OpenedIndex, *, can_write: bool = True) -> dict[bytes, Record]:
        self._files.close()
        self.slots = self._empty_slots()
        self._index = opened.index
        self._counts.num_index_repairs += opened.num_mended
        files = self._files.found()
        found = reconcile(opened.records, files, self._settings.cap_bytes)
        self._restore(found, can_write)
        self._counts.num_lost_at_open += len(found.lost)
        self._next_order = 1 + max((record.order for record in found.held.values()), default=0)
        self.slots.skip_to(1 + max(files, default=-1))
        self._measure_index()
        return found.held

    def _open_to_read(self) -> list[DiskBlock]:
        self._close_index()
        try:
            opened = open_index_to_read(self._index_folder, self._settings)
        except IndexFailed:
            return []
        return parents_first(self._open(opened, can_write=False))

    def _reopen(self) -> None:
        """Reads meanwhile find nothing."""
        self._close_index()
        self._open(open_index(self._index_folder, self._settings))

    def _close_index(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            with suppress(IndexFailed):
                index.close()

    def _restore(self, found: Found, can_write: bool) -> None:
        for number, (form, taken) in found.slots().items():
            try:
                self._files.open(number, form)
                if can_write:
                    self._files.truncate(number, form.end_of(max(taken)))
            except OSError as error:
                log.warning("disk_segment_lost", segment=number, error=str(error))
                found.lose(number)
            else:
                self.slots.restore(number, form, taken)
        if can_write:
            for number, form in found.unused.items():
                self._files.remove(number, form)
            self._writable().remove(found.lost)
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
            self._free((record.spot.segment, record.spot.slot) for record in records if record is not None)

    def _make_room(self) -> None:
        """On a full disk the index cannot be told of removals before files have gone."""
        if self._index is None:
            return
        owed: dict[int, set[int]] = {}
        for record in self._index.get(list(self._owed)):
            if record is not None:
                owed.setdefault(record.spot.segment, set()).add(record.spot.slot)
        for number, slots in owed.items():
            segment = self.slots.segments.get(number)
            if segment is not None and len(slots - segment.free) == segment.num_blocks:
                self.slots.drop(number)
                self._files.remove(number, segment.form)

    def _write(self, shape: Shape, blocks: Sequence[BlockToWrite]) -> None:
        index, names = self._writable(), [block.name for block in blocks]
        places = self.slots.allocate(len(blocks), shape)
        try:
            spots = [Spot(number, slot, self.slots.form_of(number)) for number, slot in places]
            self._open_files(spots)
            write_blocks(self._files, blocks, spots)
            if self._settings.fsync == "always":
                self._files.sync()
            before = index.get(names)
            index.put({b.name: self._record(b, spot) for b, spot in zip(blocks, spots, strict=True)})
        except BaseException:
            self._free(places)
            raise
        self._free((record.spot.segment, record.spot.slot) for record in before if record is not None)

    def _open_files(self, spots: Sequence[Spot]) -> None:
        for number, form in {spot.segment: spot.form for spot in spots}.items():
            if not self._files.is_open(number):
                self._files.open(number, form)

    def _record(self, block: BlockToWrite, spot: Spot) -> Record:
        self._next_order += 1
        return Record(spot, block.parent, self._next_order, time.time(), block.num_hits, block.checksums)

    def _fits(self, block: BlockToRead, record: Record, layers: range) -> bool:
        num_layers, layer_bytes, _ = record.spot.form
        fits = layers.stop <= num_layers and len(block.into) == len(layers)
        return fits and block.into[0].size == layer_bytes and block.name not in self._owed

    def _still_there(self, spots: Mapping[bytes, Spot]) -> dict[bytes, Spot]:
        index = self._index
        if index is None:
            return {}
        records = index.get(list(spots))
        return {
            name: spot
            for (name, spot), record in zip(spots.items(), records, strict=True)
            if record is not None and record.spot == spot
        }

    def _free(self, places: Iterable[Place]) -> None:
        """Places that were given back already, after a write whose end is unknown, are passed over."""
        for number, form in self.slots.free(place for place in places if self.slots.is_taken(place)):
            self._files.remove(number, form)

    def _free_all(self) -> None:
        for number in list(self.slots.segments):
            form = self.slots.form_of(number)
            self.slots.drop(number)
            self._files.remove(number, form)

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
        with suppress(OSError):
            for entry in os.scandir(self._index_folder):
                with suppress(FileNotFoundError):
                    num_bytes += entry.stat().st_blocks * 512
        self.slots.num_index_bytes = num_bytes
