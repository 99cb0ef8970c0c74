"""One folder of blocks: RocksDB says where each lies, segment files hold the bytes. Blocking.

One thread opens, writes, removes, syncs and closes; one other may read meanwhile.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from libs.kv.checksum import checksum
from services.kv_store.disk.blocks import BlockToRead, BlockToWrite, DiskBlock, Shape
from services.kv_store.disk.counts import DiskCounts, ReadResult
from services.kv_store.disk.index import Index
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
        self._files = SegmentFiles(folder / "segments", system)
        self.slots = SlotMap(settings.cap_bytes, settings.segment_file_bytes, settings.write_buffer_bytes)
        self._next_order = 0
        self._index: Index

    def open(self) -> list[DiskBlock]:
        """What is held. Whatever does not match is dropped and counted."""
        (self._folder / "segments").mkdir(parents=True, exist_ok=True)
        self._index_folder.mkdir(parents=True, exist_ok=True)
        self._index = Index(self._index_folder, self._settings)
        files = self._files.found()
        found = reconcile(self._index.items(), files, self._settings.cap_bytes)
        self._counts.num_lost_at_open += len(found.lost)
        self._restore(found)
        self._next_order = 1 + max((record.order for record in found.held.values()), default=0)
        self.slots.skip_to(1 + max(files, default=-1))
        self.measure_index()
        return parents_first(found.held)

    def write(self, blocks: Sequence[BlockToWrite]) -> set[bytes]:
        """Names of those that are held now; the others did not fit under the cap."""
        held: set[bytes] = set()
        by_shape: dict[Shape, dict[bytes, BlockToWrite]] = {}
        for block in blocks:
            by_shape.setdefault(block.shape, {})[block.name] = block
        for shape, group in by_shape.items():
            fitting = list(group.values())[: self.slots.num_allocatable(shape)]
            if fitting:
                self._write(shape, fitting)
                held.update(block.name for block in fitting)
        self.measure_index()
        return held

    def read(self, wanted: Sequence[BlockToRead], layers: range) -> list[ReadResult]:
        """Fill the rows; what is not whole and right is not READ."""
        records = self._index.get([block.name for block in wanted])
        return [self._read(block, record, layers) for block, record in zip(wanted, records, strict=True)]

    def remove(self, names: Sequence[bytes]) -> None:
        """Forget these; unknown names are passed over."""
        records = self._index.get(names)
        self._index.remove(names)
        self._free((record.segment, record.slot) for record in records if record is not None)

    def clear(self) -> None:
        """Forget all."""
        names = [name for name, _ in self._index.items()]
        for start in range(0, len(names), 1024):
            self.remove(names[start : start + 1024])

    def sync(self) -> None:
        """Returns when all that was written is on the device."""
        self._files.sync()
        self._index.sync()

    def close(self) -> None:
        """Keeps what is held for the next open."""
        self._index.close()
        self._files.close()

    def measure_index(self) -> None:
        """Tell the slot map what RocksDB takes."""
        self.slots.num_index_bytes = sum(
            path.stat().st_blocks * 512 for path in self._index_folder.iterdir() if path.is_file()
        )

    def _restore(self, found: Found) -> None:
        for number, (shape, taken) in found.slots().items():
            self._files.open(number, shape)
            self.slots.restore(number, shape, taken)
            self._files.truncate(number, (max(taken) + 1) * shape[0] * shape[1])
        for number, shape in found.unused.items():
            self._files.remove(number, shape)
        if found.lost:
            self._index.remove(found.lost)

    def _write(self, shape: Shape, blocks: Sequence[BlockToWrite]) -> None:
        places = self.slots.allocate(len(blocks), shape)
        try:
            self._write_bytes(shape, blocks, places)
            before = self._index.get([block.name for block in blocks])
            self._index.put({b.name: self._record(b, place) for b, place in zip(blocks, places, strict=True)})
        except BaseException:
            self._free(places)
            raise
        self._free((record.segment, record.slot) for record in before if record is not None)
        if self._settings.fsync == "always":
            self.sync()

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

    def _read(self, block: BlockToRead, record: Record | None, layers: range) -> ReadResult:
        if record is None or layers.stop > record.num_layers:
            return ReadResult.MISSING
        kept = record.checksums[layers.start : layers.stop]
        offset = record.slot * record.num_layers * record.layer_bytes + layers.start * record.layer_bytes
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
        shapes = {number: segment.shape for number, segment in self.slots.segments.items()}
        for number in self.slots.free(places):
            self._files.remove(number, shapes[number])
