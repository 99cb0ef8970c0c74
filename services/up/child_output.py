"""The output of a child: kept in a bounded log file, and read for the lines that are shown at once."""

import json
import logging
from collections import deque
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

MAX_LOG_BYTES = 16 * 2**20
NUM_LAST_LINES = 12

_SHOWN_LEVELS = ("error", "critical")
_DULL_FIELDS = ("event", "level", "timestamp", "service", "name", "incarnation", "exception", "logger")


class LogFile(RotatingFileHandler):
    """Appends to `path`; when full it becomes `path.1` and a new one begins: two files bound the space."""

    terminator = ""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8", errors="surrogateescape")

    def write(self, line: bytes) -> None:
        """Append; visible to others at once."""
        self.emit(logging.makeLogRecord({"msg": line.decode("utf-8", "surrogateescape")}))


class ChildOutput:
    """Cuts what comes in into lines, hands them to the log, and gives back the errors among them."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._rest = b""
        self.last_plain_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        """Lines that are no log events: what a dying interpreter or native code says."""

    def feed(self, data: bytes) -> list[str]:
        """New output; returns errors to show, one line each."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LOG_BYTES:  # never a line end: what is this?
            lines, self._rest = [*lines, self._rest], b""
        shown: list[str] = []
        for line in lines:
            self._write(line + b"\n")
            if said := self._read(line):
                shown.append(said)
        return shown

    def _read(self, line: bytes) -> str | None:
        text = line.decode("utf-8", "replace").rstrip()
        try:
            event = json.loads(text) if text.startswith("{") else None
        except ValueError:
            event = None
        if not isinstance(event, dict) or "event" not in event:
            if text:
                self.last_plain_lines.append(text)
            return None
        return error_line(event) if event.get("level") in _SHOWN_LEVELS else None


def error_line(event: dict[str, Any]) -> str:
    """A log event in one line: what happened, its fields, and the last line of a traceback."""
    facts = [f"{key}={value}" for key, value in event.items() if key not in _DULL_FIELDS]
    reason = str(event.get("exception", "")).strip().rpartition("\n")[2]
    facts += [reason] if reason and reason not in " ".join(facts) else []
    return f"{event['event']} {' '.join(facts)}".strip().replace("\n", " ")
