"""RocksDB as the durable index: name -> record. Blocking; used from threads."""

import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from rocksdict import AccessType, Rdict, WriteBatch, WriteOptions

from services.kv_store.disk.index_options import index_options
from services.kv_store.disk.record import Record, RecordUnreadable, decode_record, encode_record
from services.kv_store.disk.settings import DiskSettings

END_KEY = b"\xff" * 32
"""The last key of all, after every name: an iteration that reaches it has seen everything. RocksDB's
iterators stop at a damaged block as if it were the end."""
MAX_RECENT = 8192
SMALLEST_SKIP = 1 << 44
"""Of 2**64: a millionth of the names, which are evenly spread."""


class IndexFailed(Exception):
    """RocksDB could not open, read or write; carries what it said."""


@contextmanager
def _translated(folder: Path) -> Generator[None]:
    try:
        yield
    except Exception as error:  # the binding raises no narrower one
        raise IndexFailed(f"{folder}: {error}") from error


@contextmanager
def _linked(folder: Path) -> Generator[Path]:
    """The same files in a folder that can be written to: the binding puts a file of its own beside them."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="kvmesh-index-", dir=memory if memory.is_dir() else None) as linked:
        for path in folder.iterdir():
            if path.name.endswith((".sst", ".log")) or path.name.startswith(
                ("MANIFEST", "CURRENT", "IDENTITY")
            ):
                (Path(linked) / path.name).symlink_to(path.resolve())
        yield Path(linked)


class Index:
    """Opened by its constructor. One thread writes; others may read meanwhile."""

    def __init__(self, folder: Path, settings: DiskSettings, *, can_write: bool = True) -> None:
        self._folder, self._options = folder, index_options(settings)
        self.can_write = can_write
        self._write_options = WriteOptions()
        self._write_options.sync = settings.fsync == "always"
        # A block is read a few layers at a time; its record is wanted again each time.
        self._recent: dict[bytes, Record] = {}
        self._lock = threading.Lock()
        with _translated(folder), ExitStack() as opening:
            path = folder if can_write else opening.enter_context(_linked(folder))
            access = AccessType.read_write() if can_write else AccessType.read_only(False)
            self._db = Rdict(str(path), self._options, access_type=access)
            self._closing = opening.pop_all()

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

    def clear(self) -> None:
        """Forget all. Raises IndexFailed."""
        with self._lock, _translated(self._folder):
            self._recent.clear()
            self._db.delete_range(b"", END_KEY)
            self._db.flush()

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

    def salvage(self) -> dict[bytes, bytes]:
        """Keys and values of all that can still be read: seeks on past each damaged part."""
        found: dict[bytes, bytes] = {}
        cursor, position, skip = self._db.iter(), 0, SMALLEST_SKIP
        while position < 1 << 64:
            cursor.seek(position.to_bytes(8, "big"))
            while cursor.valid():
                key = cast("bytes", cursor.key())
                found[key] = cursor.value()
                position, skip = int.from_bytes(key[:8].ljust(8, b"\0"), "big"), SMALLEST_SKIP
                cursor.next()
            position, skip = position + skip, 2 * skip
        return found

    def put_raw(self, values: Mapping[bytes, bytes]) -> None:
        """What was salvaged, where it is missing now. Raises IndexFailed."""
        with _translated(self._folder):
            for key, value in values.items():
                if self._db.get(key) is None:
                    self._db.put(key, value)

    def sync(self) -> None:
        """Returns when all writes are on the device. Raises IndexFailed."""
        with _translated(self._folder):
            self._db.flush_wal(True)

    def close(self) -> None:
        """What was written is kept. Raises IndexFailed."""
        with _translated(self._folder), self._closing:
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
