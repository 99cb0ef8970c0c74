"""The access trace on disk: appended in the background, rotated by size."""

import asyncio
import os
from collections import deque
from pathlib import Path
from typing import NoReturn

import structlog

from libs.kv.access_trace import TraceLine, encode_line, rotated_files

MAX_WAITING = 10_000
"""Lines that wait to be written; what comes when so many do is dropped and counted."""
GATHER_SECONDS = 0.1
NUM_FILES = 4
"""Of a trace, the one being written among them."""
TAIL_BYTES = 64 << 10

log = structlog.get_logger()


class TraceFile:
    """`path`, and `path.1` (the latest) to `path.3` rotated away; never more than `max_bytes` in all."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_file_bytes = path, max(1, max_bytes // NUM_FILES)
        self._waiting: deque[bytes] = deque()
        self._is_due = asyncio.Event()
        self._may_end_cut = True
        """A crash, or a disk that became full, may have left a part of a line."""
        self.num_dropped = 0
        """Lines not written: too many waited, or the disk would not take them."""

    def add(self, line: TraceLine) -> None:
        """Write it soon."""
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        self._waiting.append(encode_line(line))
        self._is_due.set()

    async def run(self) -> NoReturn:
        """For ever. What the disk will not take is dropped."""
        while True:
            await self._is_due.wait()
            await asyncio.sleep(GATHER_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits."""
        self._is_due.clear()
        lines = list(self._waiting)
        self._waiting.clear()
        if not lines:
            return
        writing = asyncio.ensure_future(asyncio.to_thread(self._append, lines))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The thread goes on; nobody else may write before it has ended.
            await asyncio.wait([writing])
            raise
        except OSError as error:
            self.num_dropped += len(lines)
            self._may_end_cut = True
            log.warning("access_trace_not_written", path=str(self._path), error=str(error))

    def _append(self, lines: list[bytes]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._may_end_cut:
            _drop_cut_line(self._path)
            self._may_end_cut = False
        while lines:
            num_bytes = self._path.stat().st_size if self._path.exists() else 0
            num_fitting = 0
            for line in lines:
                if num_bytes and num_bytes + len(line) > self._max_file_bytes:
                    break
                num_bytes, num_fitting = num_bytes + len(line), num_fitting + 1
            with self._path.open("ab") as file:
                file.write(b"".join(lines[:num_fitting]))
            del lines[:num_fitting]
            if lines:
                self._rotate()

    def _rotate(self) -> None:
        files = rotated_files(self._path)
        for number, path in zip(range(len(files), 0, -1), files, strict=True):
            if number < NUM_FILES:
                os.replace(path, self._path.with_name(f"{self._path.name}.{number}"))
            else:
                path.unlink()


def _drop_cut_line(path: Path) -> None:
    """Together with the next line it would be one that nobody can read."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start and b"\n" not in tail:
            length = min(start, TAIL_BYTES)
            start = file.seek(start - length)
            tail = file.read(length)
        file.truncate(start + tail.rfind(b"\n") + 1)
