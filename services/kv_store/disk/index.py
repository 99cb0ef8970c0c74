"""RocksDB as the durable index: name -> record. Blocking; used from threads."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from rocksdict import AccessType, Rdict, WriteBatch, WriteOptions

from services.kv_store.disk.index_options import index_options
from services.kv_store.disk.record import Record, RecordUnreadable, decode_record, encode_record
from services.kv_store.disk.settings import DiskSettings

END_KEY = b"\xff" * 32
"""The last key of all, longer than any name: an iteration that reaches it has seen everything. RocksDB's
iterators stop at a damaged block as if it were the end."""
MAX_RECENT = 8192


class IndexFailed(Exception):
    """RocksDB could not read or write; carries what it said."""


class Index:
    """Opened by its constructor. One thread writes; others may read."""

    def __init__(self, folder: Path, settings: DiskSettings, *, can_write: bool = True) -> None:
        self._folder, self._options = folder, index_options(settings)
        access = AccessType.read_write() if can_write else AccessType.read_only(False)
        self._write_options = WriteOptions()
        self._write_options.sync = settings.fsync == "always"
        self._lock = threading.Lock()
        self._recent: dict[bytes, Record] = {}
        try:
            self._db = Rdict(str(folder), self._options, access_type=access)
            if can_write and self._db.get(END_KEY) is None:
                self._db.put(END_KEY, b"")
        except Exception as error:
            raise IndexFailed(f"{folder}: {error}") from error

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

    def items(self) -> Iterator[tuple[bytes, Record]]:
        """Every record, by name. Raises IndexFailed where that could not be all of them."""
        last = b""
        try:
            for key, body in self._db.items():
                last = name = cast("bytes", key)
                if name != END_KEY:
                    yield name, decode_record(body)
        except (Exception, RecordUnreadable) as error:
            raise IndexFailed(f"reading all of {self._folder} failed after {last.hex()}: {error}") from error
        if last != END_KEY:
            raise IndexFailed(f"reading all of {self._folder} ended at {last.hex()}")

    def sync(self) -> None:
        """Returns when all writes are on the device. Raises IndexFailed."""
        try:
            self._db.flush_wal(True)
        except Exception as error:
            raise IndexFailed(f"{self._folder}: {error}") from error

    def close(self) -> None:
        """What was written is kept. Raises IndexFailed."""
        try:
            self._db.close()
        except Exception as error:
            raise IndexFailed(f"{self._folder}: {error}") from error

    def _load(self, names: list[bytes]) -> list[Record | None]:
        keys = cast("list[str | int | float | bytes | bool]", names)
        try:
            bodies = cast("list[bytes | None]", self._db.get(keys))
        except Exception:  # noqa: BLE001  # the binding raises no narrower one
            return [self._load_one(name) for name in names]
        return [None if body is None else self._decode(body) for body in bodies]

    def _load_one(self, name: bytes) -> Record | None:
        try:
            body = self._db.get(name)
        except Exception:  # noqa: BLE001  # the binding raises no narrower one
            return None
        return None if body is None else self._decode(body)

    @staticmethod
    def _decode(body: bytes) -> Record | None:
        try:
            return decode_record(body)
        except RecordUnreadable:
            return None

    def _write(self, batch: WriteBatch, names: Iterable[bytes]) -> None:
        try:
            self._db.write(batch, self._write_options)
        except Exception as error:
            raise IndexFailed(f"{self._folder}: {error}") from error
        finally:
            with self._lock:
                for name in names:
                    self._recent.pop(name, None)
