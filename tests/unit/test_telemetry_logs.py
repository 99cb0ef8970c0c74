"""One line per event, for machines or for people, the libraries' own among them."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from libs.telemetry.logs import LogFormat, LogLevel, configure_logs


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


def configured(level: LogLevel = "info", log_format: LogFormat = "auto") -> io.StringIO:
    sink = io.StringIO()
    configure_logs("router", "router-0", "ab12", level=level, log_format=log_format, stream=sink)
    return sink


def events(sink: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_an_event_is_one_json_line_that_says_who_spoke() -> None:
    sink = configured()
    structlog.get_logger().info("opened", num_blocks=3)
    (event,) = events(sink)
    assert event.pop("timestamp")
    assert event == {
        "event": "opened", "level": "info", "num_blocks": 3, "service": "router", "name": "router-0",
        "incarnation": "ab12",
    }  # fmt: skip


def test_what_libraries_log_comes_in_the_same_shape() -> None:
    sink = configured()
    logging.getLogger("nats.aio").warning("slow consumer %s", 7)
    (event,) = events(sink)
    assert (event["event"], event["logger"], event["name"]) == ("slow consumer 7", "nats.aio", "router-0")


def test_an_exception_stays_within_its_line() -> None:
    sink = configured()
    try:
        raise ValueError("no such layer")
    except ValueError:
        structlog.get_logger().exception("failed")
    (event,) = events(sink)
    assert event["exception"].endswith("ValueError: no such layer")


def test_what_json_does_not_know_is_written_as_text() -> None:
    sink = configured()
    structlog.get_logger().info("opened", where={1, 2}, raw=b"\xff")
    assert len(events(sink)) == 1


@pytest.mark.parametrize(("level", "said"), [("debug", 3), ("info", 2), ("error", 1)])
def test_below_the_level_nothing_is_written(level: LogLevel, said: int) -> None:
    sink = configured(level)
    for log in (structlog.get_logger().debug, structlog.get_logger().info, structlog.get_logger().error):
        log("heard")
    assert len(events(sink)) == said


def test_chatty_libraries_are_held_to_warnings() -> None:
    sink = configured("debug")
    logging.getLogger("httpx").info("GET")
    assert events(sink) == []


def test_warnings_of_python_are_log_lines() -> None:
    sink = configured()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("deprecated", stacklevel=1)
    assert "deprecated" in events(sink)[0]["event"]


def test_for_people_it_is_not_json() -> None:
    sink = configured(log_format="console")
    structlog.get_logger().info("opened", num_blocks=3)
    assert "num_blocks=3" in sink.getvalue()
    with pytest.raises(ValueError):
        events(sink)


class _Broken(io.StringIO):
    def write(self, text: str, /) -> int:
        raise BrokenPipeError("nobody reads this")

    def flush(self) -> None:
        raise BrokenPipeError("nobody reads this")


def test_a_line_that_cannot_be_written_is_lost_and_nothing_else() -> None:
    configure_logs("router", "router-0", "ab12", log_format="json", stream=_Broken())
    structlog.get_logger().info("stop_asked")
    logging.getLogger("library").error("said")
