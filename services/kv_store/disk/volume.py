"""One folder of blocks: RocksDB says where each lies, segment files hold the bytes. Blocking.

One thread opens, writes, removes, syncs and closes; others may read meanwhile.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.kv_store.disk.block_bytes import read_blocks, write_blocks
from services.kv_store.disk.blocks import BlockToRead, BlockToWrite, DiskBlock, ReadResult, Shape
from services.kv_store.disk.index import Index, IndexFailed
from services.kv_store.disk.layout import Place, Spot
from services.kv_store.disk.reconcile import parents_first, reconcile
from services.kv_store.disk.record import Record
from services.kv_store.disk.segment_files import SegmentFiles, System
from services.kv_store.disk.settings import DiskSettings
from services.kv_store.disk.slot_map import SlotMap

log = structlog.get_logger()


class FolderUnusable(Exception):
    """The folder cannot be made, or another process uses it."""


@dataclass(slots=True)
class DiskCounts:
    """All only rise. Blocks, unless the name says otherwise."""

    num_written: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
    """Reads that ended with an error of the device or the system."""
    num_lost_at_open: int = 0
    """In the index, but not whole in the files."""
    num_write_errors: int = 0
    num_pauses: int = 0
    num_index_drops: int = 0
    """Times that a damaged index was dropped with all blocks."""


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

    def open(self) -> tuple[list[DiskBlock], bool]:
        """What is held, and whether it can be written to. Raises FolderUnusable."""
        try:
            for folder in (self._folder, self._segment_folder, self._index_folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._owner = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderUnusable(f"{self._folder} is in use by another store; give each its own") from error
        except OSError as error:
            raise FolderUnusable(f"{self._folder} for blocks on disk: {error}") from error
        held: dict[bytes, Record] = {}
        try:
            held = self._load()
            self._resume()
        except (OSError, IndexFailed) as error:
            log.warning("disk_opened_without_writing", folder=str(self._folder), error=str(error))
            return parents_first(held), False
        return parents_first(held), True

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
        if index is None:
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
        self._settle()

    def sync(self) -> None:
        """Returns when all that was written is on the device."""
        self._files.sync()
        self._writable().sync()

    def try_again(self) -> None:
        """After a failed write: returns once writing works. The index may have been opened anew for it."""
        for folder in (self._index_folder, self._segment_folder):
            _probe_writing(folder, self._settings.probe_bytes)
        try:
            self._resume()
        except IndexFailed:  # after an error RocksDB takes no write until it is opened anew
            if self._index is None:
                self._drop_index()  # callers know nothing of its blocks
            self._close_index()
            self._load()
            self._resume()

    def close(self) -> None:
        """Keeps what is held for the next open. Does nothing where nothing is open."""
        index, self._index = self._index, None
        with ExitStack() as last_steps:
            if self._owner is not None:
                last_steps.callback(os.close, self._owner)
            last_steps.callback(self._files.close)
            if index is not None:
                last_steps.callback(index.close)
                if self._settings.fsync != "off":
                    self._files.sync()
                    index.sync()

    def _load(self) -> dict[bytes, Record]:
        """The blocks held. This is a cache: a damaged index is dropped with all blocks, and filled again.

        Raises OSError and IndexFailed where nothing can be written.
        """
        try:
            return self._restore()
        except IndexFailed as error:
            damage = str(error)
        log.error("disk_index_dropped", folder=str(self._index_folder), error=damage)
        self._counts.num_index_drops += 1
        self._drop_index()
        return self._restore()

    def _restore(self) -> dict[bytes, Record]:
        index = Index(self._index_folder, self._settings)
        try:
            records = index.items()
        except IndexFailed:
            index.close()
            raise
        files = self._files.found()
        held, lost = reconcile(records, files, self._settings.cap_bytes)
        self._files.close()
        self.slots = self._empty_slots()
        for number, blocks in held.items():
            form, taken = files[number][0], {record.spot.slot for record in blocks.values()}
            self._files.truncate(number, form, form.end_of(max(taken)))
            self.slots.restore(number, form, taken)
        for number in files.keys() - held.keys():
            self._files.remove(number, files[number][0])
        self.slots.skip_to(1 + max(files, default=-1))
        self._index = index
        self._owed.update(lost)
        self._counts.num_lost_at_open += len(lost)
        all_held = {name: record for blocks in held.values() for name, record in blocks.items()}
        self._next_order = 1 + max((record.order for record in all_held.values()), default=0)
        self._measure_index()
        return all_held

    def _resume(self) -> None:
        """Proves that writing works, by what is to be written anyway."""
        self._writable().mark_end()
        self._settle()
        self.sync()

    def _drop_index(self) -> None:
        for path in self._index_folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _close_index(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            with suppress(IndexFailed):
                index.close()

    def _settle(self) -> None:
        """Files go before their records: a full disk takes no record of a removal before there is room."""
        if self._owed:
            index, names = self._writable(), list(self._owed)
            records = index.get(names)
            self._free((record.spot.segment, record.spot.slot) for record in records if record is not None)
            index.remove(names)
            self._owed.clear()

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

    def _writable(self) -> Index:
        if self._index is None:
            raise IndexFailed(f"{self._index_folder} is not open")
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


def _probe_writing(folder: Path, num_bytes: int) -> None:
    """Raises OSError where so much cannot be written now."""
    path = folder / "probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(num_bytes))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
