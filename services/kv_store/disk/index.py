"""RocksDB as the durable index: name -> record. Blocking; used from threads."""

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch, WriteOptions

from services.kv_store.disk.record import Record, RecordUnreadable, decode_record, encode_record
from services.kv_store.disk.settings import DiskSettings

END_KEY = b"\xff" * 32
"""The last key of all, after every name: an iteration that reaches it has seen everything. RocksDB's
iterators stop at a damaged block as if it were the end."""
MAX_RECENT = 8192


def index_options(settings: DiskSettings) -> Options:
    """No compression: checksums do not compress. All logs are bounded, and none is preallocated at length."""
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(DBCompressionType.none())
    buffer_bytes = settings.write_buffer_bytes
    options.set_write_buffer_size(buffer_bytes)
    options.set_max_write_buffer_number(2)
    options.set_max_total_wal_size(2 * buffer_bytes)
    options.set_target_file_size_base(4 * buffer_bytes)
    options.set_max_bytes_for_level_base(4 * buffer_bytes)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(2)
    options.set_manifest_preallocation_size(64 << 10)
    options.set_max_manifest_file_size(256 << 10)
    options.set_max_log_file_size(256 << 10)
    options.set_keep_log_file_num(2)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(settings.index_cache_bytes))
    table.set_cache_index_and_filter_blocks(True)
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    return options


class IndexFailed(Exception):
    """RocksDB could not open, read or write; carries what it said."""


@contextmanager
def _translated(folder: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:  # the binding raises no narrower one
        raise IndexFailed(f"{folder}: {error}") from error


class Index:
    """Opened by its constructor, which raises IndexFailed. One thread writes; others may read meanwhile."""

    def __init__(self, folder: Path, settings: DiskSettings) -> None:
        self._folder = folder
        self._write_options = WriteOptions()
        self._write_options.sync = settings.fsync == "always"
        # A block is read a few layers at a time; its record is wanted again each time.
        self._recent: dict[bytes, Record] = {}
        self._lock = threading.Lock()
        with _translated(folder):
            self._db = Rdict(str(folder), index_options(settings))

    def get(self, names: Sequence[bytes]) -> list[Record | None]:
        """One per name; None where there is none or it cannot be read."""
        with self._lock:
            unknown = [name for name in names if name not in self._recent]
            found = dict(zip(unknown, self._load(unknown), strict=True)) if unknown else {}
            records = [found[name] if name in found else self._recent[name] for name in names]
            if len(self._recent) > MAX_RECENT:
                self._recent.clear()
            self._recent.update({name: record for name, record in found.items() if record is not None})
            return records

    def put(self, records: Mapping[bytes, Record]) -> None:
        """All or none. Raises IndexFailed."""
        batch = WriteBatch(raw_mode=True)
        for name, record in records.items():
            batch.put(name, encode_record(record))
        self._write(batch, records)

    def remove(self, names: Sequence[bytes]) -> None:
        """All or none. Raises IndexFailed."""
        batch = WriteBatch(raw_mode=True)
        for name in names:
            batch.delete(name)
        self._write(batch, names)

    def mark_end(self) -> None:
        """Lets an iteration tell that it is complete; proves that writing works. Raises IndexFailed."""
        with _translated(self._folder):
            self._db.put(END_KEY, b"", self._write_options)

    def items(self) -> list[tuple[bytes, Record | None]]:
        """Every name with its record, None for an unreadable one. Raises IndexFailed where some may lack."""
        found: list[tuple[bytes, Record | None]] = []
        last = b""
        with _translated(self._folder):
            for key, body in self._db.items():
                last = cast("bytes", key)
                if last != END_KEY:
                    found.append((last, _decoded(body, with_checksums=False)))
            is_new = self._db.latest_sequence_number() == 0
        if last != END_KEY and not is_new:
            raise IndexFailed(f"{self._folder}: reading all ended at {last.hex()}, before the end")
        return found

    def sync(self) -> None:
        """Returns when all writes are on the device. Raises IndexFailed."""
        with _translated(self._folder):
            self._db.flush_wal(True)

    def close(self) -> None:
        """What was written is kept. Raises IndexFailed."""
        with _translated(self._folder):
            self._db.close()

    def _load(self, names: list[bytes]) -> list[Record | None]:
        keys = cast("list[str | int | float | bytes | bool]", names)
        try:
            bodies = cast("list[bytes | None]", self._db.get(keys))
        except Exception:  # noqa: BLE001  # the binding raises no narrower one
            return [self._load_one(name) for name in names]
        return [_decoded(body) for body in bodies]

    def _load_one(self, name: bytes) -> Record | None:
        try:
            return _decoded(self._db.get(name))
        except Exception:  # noqa: BLE001  # the binding raises no narrower one
            return None

    def _write(self, batch: WriteBatch, names: Iterable[bytes]) -> None:
        try:
            with _translated(self._folder):
                self._db.write(batch, self._write_options)
        finally:
            with self._lock:
                for name in names:
                    self._recent.pop(name, None)


def _decoded(body: bytes | None, *, with_checksums: bool = True) -> Record | None:
    try:
        return None if body is None else decode_record(body, with_checksums=with_checksums)
    except RecordUnreadable:
        return None
