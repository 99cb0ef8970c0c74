"""Opening an index that may be damaged: mend it, and where that fails begin anew. Blocking."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from rocksdict import Rdict

from services.kv_store.disk.index import Index, IndexFailed
from services.kv_store.disk.index_options import index_options
from services.kv_store.disk.record import Record
from services.kv_store.disk.settings import DiskSettings

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class OpenedIndex:
    """`records` is all of it. `num_mended` counts repairs that were needed."""

    index: Index
    records: Sequence[tuple[bytes, Record | None]]
    num_mended: int = 0


def probe_writing(folder: Path, num_bytes: int) -> None:
    """Raises OSError where so much cannot be written now."""
    path = folder / "probe"
    try:
        with path.open("wb") as file:
            file.write(bytes(num_bytes))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def open_index(folder: Path, settings: DiskSettings) -> OpenedIndex:
    """Open for reading and writing. Raises IndexFailed or OSError only where nothing can be written."""
    try:
        return _open(folder, settings)
    except IndexFailed as error:
        # Without room RocksDB cannot open either, and a repair would do harm.
        probe_writing(folder, settings.probe_bytes)
        log.warning("disk_index_damaged", error=str(error))
    try:
        return _mend(folder, settings)
    except IndexFailed as error:
        log.warning("disk_index_lost", error=str(error))
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return _open(folder, settings, num_mended=1)


def open_index_to_read(folder: Path, settings: DiskSettings) -> OpenedIndex:
    """For a folder that takes no writes now. Raises IndexFailed."""
    index = Index(folder, settings, can_write=False)
    return OpenedIndex(index, [(name, record) for name, record in index.items()])


def _open(folder: Path, settings: DiskSettings, num_mended: int = 0) -> OpenedIndex:
    index = Index(folder, settings)
    try:
        records = index.items()
        index.mark_end()
    except IndexFailed:
        index.close()
        raise
    return OpenedIndex(index, records, num_mended)


def _mend(folder: Path, settings: DiskSettings) -> OpenedIndex:
    """A repair drops every damaged file whole; what else was in it is read out before."""
    salvaged: dict[bytes, bytes] = {}
    try:
        damaged = Index(folder, settings, can_write=False)
    except IndexFailed:
        pass
    else:
        salvaged = damaged.salvage()
        damaged.close()
    try:
        Rdict.repair(str(folder), index_options(settings))
    except Exception as error:  # the binding raises no narrower one
        raise IndexFailed(f"{folder}: {error}") from error
    shutil.rmtree(folder / "lost", ignore_errors=True)
    index = Index(folder, settings)
    index.put_raw(salvaged)
    index.mark_end()
    index.close()
    return _open(folder, settings, num_mended=1)
