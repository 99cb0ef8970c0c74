"""Logs: one structured line per event, the libraries' own lines among them.

Modules use `structlog.get_logger()`; events are past-tense names with fields:
log.info("worker_departed", worker=...).
"""

import io
import logging
import sys
from contextlib import suppress
from typing import Any, Literal, TextIO, cast

import structlog

LogFormat = Literal["auto", "json", "console"]
LogLevel = Literal["debug", "info", "warning", "error"]

_NOISY_LIBRARIES = ("httpx", "httpcore", "asyncio", "urllib3", "nats", "uvicorn")


def configure_logs(
    service: str,
    name: str,
    incarnation: str,
    *,
    level: LogLevel = "info",
    log_format: LogFormat = "auto",
    stream: TextIO | None = None,
) -> None:
    """Set up structlog and route stdlib logging through it; every line carries service, name and incarnation.

    `auto` writes for people where `stream` (default stderr) is a terminal, else JSON.
    """
    # pythonw and some daemons have no stderr
    sink = cast("TextIO", _Unfailing(stream or sys.stderr or io.StringIO()))
    as_json = log_format == "json" or (log_format == "auto" and not sink.isatty())
    identity = {"service": service, "name": name, "incarnation": incarnation}

    def add_identity(
        _logger: Any, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        for key, value in identity.items():
            event.setdefault(key, value)
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_identity,
    ]
    numeric_level = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *_rendering(as_json, sink)],
        wrapper_class=structlog.make_filtering_bound_logger(numeric_level),
        logger_factory=structlog.WriteLoggerFactory(file=sink),
        cache_logger_on_first_use=False,
    )
    _route_stdlib(shared, _rendering(as_json, sink), numeric_level, sink)


class _Unfailing(io.TextIOBase):
    """Lines that cannot be written (the reader is gone, the disk is full) are lost, and nothing else is.

    A line is often written in the middle of something, such as being told to end.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> int:
        """Never raises OSError."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Never raises OSError."""
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Of the stream."""
        return self._stream.isatty()


def _rendering(as_json: bool, stream: TextIO) -> list[structlog.typing.Processor]:
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    return [structlog.dev.ConsoleRenderer(colors=stream.isatty())]


def _route_stdlib(
    shared: list[structlog.typing.Processor],
    rendering: list[structlog.typing.Processor],
    level: int,
    stream: TextIO,
) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for library in _NOISY_LIBRARIES:
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(True)
