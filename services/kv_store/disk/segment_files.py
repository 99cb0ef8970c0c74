"""The files of the segments: whole writes, whole reads, one descriptor each. Blocking; used from threads."""

import errno
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from services.kv_store.disk.blocks import Shape

Rows = Sequence[NDArray[np.uint8]]

MAX_BUFFERS = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers that one call may name."""
_NAME = re.compile(r"(\d{8})-(\d+)x(\d+)\.kv")


class System(Protocol):
    """The calls that touch segments' bytes; tests put faults in their place."""

    def pwritev(self, fd: int, buffers: Rows, offset: int, /) -> int:
        """Bytes written."""
        ...

    def preadv(self, fd: int, buffers: Rows, offset: int, /) -> int:
        """Bytes read."""
        ...

    def fdatasync(self, fd: int, /) -> None:
        """Returns when the file's bytes are on the device."""
        ...


class _Os:
    """The buffer protocol's own types know nothing of arrays before Python 3.12."""

    def pwritev(self, fd: int, buffers: Rows, offset: int, /) -> int:
        return os.pwritev(fd, cast("Sequence[bytes]", buffers), offset)

    def preadv(self, fd: int, buffers: Rows, offset: int, /) -> int:
        return os.preadv(fd, cast("Sequence[bytearray]", buffers), offset)

    def fdatasync(self, fd: int, /) -> None:
        os.fdatasync(fd)


SYSTEM: System = _Os()


@dataclass(slots=True)
class _Opened:
    fd: int
    num_readers: int = 0
    is_gone: bool = False


class SegmentFiles:
    """Segments in one folder. Writing, creating and removing is one thread's; reading may be others'."""

    def __init__(self, folder: Path, system: System) -> None:
        self._folder, self._system = folder, system
        self._opened: dict[int, _Opened] = {}
        self._lock = threading.Lock()
        self._unsynced: set[int] = set()

    def found(self) -> dict[int, tuple[Shape, int]]:
        """Shape and bytes of every segment file in the folder."""
        files: dict[int, tuple[Shape, int]] = {}
        for path in self._folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) is not None:
                number, num_layers, layer_bytes = map(int, match.groups())
                files[number] = (num_layers, layer_bytes), path.stat().st_size
        return files

    def open(self, number: int, shape: Shape) -> None:
        """Open the file, made where it is missing. Raises OSError."""
        path = self.path_of(number, shape)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES):
                raise
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with self._lock:
            self._opened[number] = _Opened(fd)

    def is_open(self, number: int) -> bool:
        """Whether it can be read and written."""
        return number in self._opened

    def path_of(self, number: int, shape: Shape) -> Path:
        """Where a segment lies; its name tells its shape."""
        return self._folder / f"{number:08}-{shape[0]}x{shape[1]}.kv"

    def remove(self, number: int, shape: Shape) -> None:
        """Unlink; readers under way still end well. Raises OSError where the file stays."""
        self._unsynced.discard(number)
        self._forget(number)
        self.path_of(number, shape).unlink(missing_ok=True)

    def truncate(self, number: int, num_bytes: int) -> None:
        """Cut off what no slot reaches. Raises OSError."""
        os.ftruncate(self._opened[number].fd, num_bytes)

    def write(self, number: int, offset: int, rows: Rows) -> None:
        """All rows one after another. Raises OSError; then some of it may be written."""
        fd = self._opened[number].fd
        self._unsynced.add(number)
        for start in range(0, len(rows), MAX_BUFFERS):
            offset = self._write(fd, offset, rows[start : start + MAX_BUFFERS])

    def read(self, number: int, offset: int, rows: Rows) -> bool:
        """Fill all rows; False where the file is gone or too short. Raises OSError."""
        with self._reading(number) as fd:
            if fd is None:
                return False
            for start in range(0, len(rows), MAX_BUFFERS):
                part = rows[start : start + MAX_BUFFERS]
                num_bytes = sum(row.size for row in part)
                # A regular file gives less than was asked for only at its end.
                if self._system.preadv(fd, part, offset) != num_bytes:
                    return False
                offset += num_bytes
        return True

    def will_read(self, number: int, offset: int, num_bytes: int) -> None:
        """Let the system read ahead, so that a row at a time is as quick as all at once."""
        with self._reading(number) as fd:
            if fd is not None:
                os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Returns when all written bytes are on the device. Raises OSError."""
        for number in list(self._unsynced):
            self._system.fdatasync(self._opened[number].fd)
            self._unsynced.discard(number)

    def close(self) -> None:
        """Close all; the files stay."""
        for number in list(self._opened):
            self._forget(number)
        self._unsynced.clear()

    @contextmanager
    def _reading(self, number: int) -> Iterator[int | None]:
        with self._lock:
            opened = self._opened.get(number)
            if opened is not None:
                opened.num_readers += 1
        try:
            yield None if opened is None else opened.fd
        finally:
            if opened is not None:
                self._end_reading(opened)

    def _end_reading(self, opened: _Opened) -> None:
        with self._lock:
            opened.num_readers -= 1
            if opened.is_gone and not opened.num_readers:
                os.close(opened.fd)

    def _forget(self, number: int) -> None:
        with self._lock:
            opened = self._opened.pop(number, None)
            if opened is not None:
                opened.is_gone = True
                if not opened.num_readers:
                    os.close(opened.fd)

    def _write(self, fd: int, offset: int, rows: Rows) -> int:
        """Returns the offset after the last byte. The system may take less than all at a time."""
        rest = list(rows)
        while rest:
            num_written = self._system.pwritev(fd, rest, offset)
            offset += num_written
            while rest and num_written >= rest[0].size:
                num_written -= rest.pop(0).size
            if rest and num_written:
                rest[0] = rest[0][num_written:]
        return offset
