"""The files of the segments: whole writes, whole reads. Blocking; used from threads."""

import os
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

import numpy as np
import structlog
from numpy.typing import NDArray

from services.kv_store.disk.layout import Form

log = structlog.get_logger()

Rows = Sequence[NDArray[np.uint8]]

_NAME = re.compile(r"(\d{8})-(\d+)x(\d+)x(\d+)\.kv")


class System:
    """The calls that touch segments' bytes; tests put faults in their place. The buffer protocol's own types
    know nothing of arrays before Python 3.12."""

    def pwritev(self, fd: int, buffers: Rows, offset: int, /) -> int:
        """Bytes written."""
        return os.pwritev(fd, cast("Sequence[bytes]", buffers), offset)

    def preadv(self, fd: int, buffers: Rows, offset: int, /) -> int:
        """Bytes read."""
        return os.preadv(fd, cast("Sequence[bytearray]", buffers), offset)

    def fdatasync(self, fd: int, /) -> None:
        """Returns when the file's bytes are on the device."""
        os.fdatasync(fd)


SYSTEM = System()


class SegmentFiles:
    """Segments in one folder. One thread writes, creates and removes; others may read meanwhile."""

    def __init__(self, folder: Path, system: System) -> None:
        self._folder, self._system = folder, system
        self._fds: dict[int, int] = {}
        self._unsynced: set[int] = set()

    def found(self) -> dict[int, tuple[Form, int]]:
        """Form and bytes of every segment file in the folder."""
        files: dict[int, tuple[Form, int]] = {}
        for path in self._folder.iterdir():
            if (match := _NAME.fullmatch(path.name)) is not None:
                number, *form = map(int, match.groups())
                with suppress(OSError):  # what cannot even be looked at holds nothing
                    files[number] = Form(*form), path.stat().st_size
        return files

    def open(self, number: int, form: Form) -> None:
        """Open the file, made where it is missing. Raises OSError."""
        self._fds[number] = os.open(self.path_of(number, form), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def is_open(self, number: int) -> bool:
        """Whether it can be read and written."""
        return number in self._fds

    def path_of(self, number: int, form: Form) -> str:
        """Where a segment lies; its name tells its form."""
        return f"{self._folder}/{number:08}-{form.num_layers}x{form.layer_bytes}x{form.stripe_slots}.kv"

    def remove(self, number: int, form: Form) -> None:
        """Unlink; readers under way still end well. A file that stays is found unused at the next open."""
        self._unsynced.discard(number)
        if number in self._fds:
            os.close(self._fds.pop(number))
        try:
            os.unlink(self.path_of(number, form))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("disk_segment_stays", segment=number, error=str(error))

    def truncate(self, number: int, form: Form, num_bytes: int) -> None:
        """Cut off what no slot reaches."""
        with suppress(OSError):  # it is then longer than it need be
            os.truncate(self.path_of(number, form), num_bytes)

    def write(self, number: int, offset: int, rows: Rows) -> None:
        """All rows, at most a stripe, one after another. Raises OSError; then some of it may be written.

        The system may take less than all at a time.
        """
        self._unsynced.add(number)
        rest = list(rows)
        while rest:
            num_written = self._system.pwritev(self._fds[number], rest, offset)
            offset += num_written
            while rest and num_written >= rest[0].size:
                num_written -= rest.pop(0).size
            if rest and num_written:
                rest[0] = rest[0][num_written:]

    @contextmanager
    def reading(self, forms: Mapping[int, Form]) -> Generator[dict[int, int | OSError]]:
        """Descriptors of these segments, or why there is none; good until the end even if a file goes.

        Each read has its own, so that the system sees each one's order and reads ahead for it.
        """
        opened: dict[int, int | OSError] = {}
        with ExitStack() as closing:
            for number, form in forms.items():
                try:
                    fd = opened[number] = os.open(self.path_of(number, form), os.O_RDONLY | os.O_CLOEXEC)
                    closing.callback(os.close, fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                except OSError as error:
                    opened[number] = error
            yield opened

    def read(self, fd: int, offset: int, rows: Rows) -> bool:
        """Fill all rows, of one size, at most a stripe; False where the file is too short. Raises OSError."""
        # A regular file gives less than was asked for only at its end.
        return self._system.preadv(fd, rows, offset) == len(rows) * rows[0].size

    def sync(self) -> None:
        """Returns when all written bytes are on the device. Raises OSError."""
        for number in list(self._unsynced):
            self._system.fdatasync(self._fds[number])
            self._unsynced.discard(number)

    def close(self) -> None:
        """Close all; the files stay."""
        for number in list(self._fds):
            os.close(self._fds.pop(number))
        self._unsynced.clear()
