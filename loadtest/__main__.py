"""python -m loadtest: load a server, and compare what came of it."""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtest import flags
from loadtest.client import Client, ClientRules, ServerError
from loadtest.conversation import Arrival
from loadtest.drive import Drive
from loadtest.plan import planned
from loadtest.progress import show_progress
from loadtest.report import Targets, report
from loadtest.tables import comparison_table, latency_table, summary_lines
from loadtest.trace import TraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 where nothing succeeded, 2 for a bad command line, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["compare"]:
            return _compare([Path(word) for word in words[1:]])
        parser = flags.parser()
        options = parser.parse_args(words)
        flags.check(parser, options)
        return asyncio.run(_load(options))
    except (ServerError, TraceError, OSError) as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class Stopwatch:
    """Seconds since `start`."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self) -> float:
        """Now."""
        return time.monotonic() - self._started

    def start(self) -> None:
        """From now on: what it took to get ready is nobody's latency."""
        self._started = time.monotonic()


async def _load(options: argparse.Namespace) -> int:
    rules = ClientRules(
        url=options.url,
        api=options.api,
        model=options.model,
        temperature=options.temperature,
        timeout_seconds=options.timeout,
        asks_usage=not options.no_usage,
        extra_body=({"ignore_eos": True} if options.ignore_eos else {}) | options.extra_body,
    )
    if not rules.model:
        asking = Client(rules, time.monotonic)
        try:
            rules = replace(rules, model=await asking.first_model(next(iter(options.api_key), "")))
        finally:
            await asking.close()
    arrivals, clock = planned(options), Stopwatch()
    client = Client(rules, clock)
    drive = Drive(client, clock, api=rules.api, max_in_flight=options.max_in_flight, api_keys=options.api_key)
    started_at = datetime.now(UTC)
    try:
        was_stopped = await _drive(drive, arrivals, clock)
    finally:
        await client.close()
    targets = Targets(options.target_ttft, options.target_tpot, options.target_e2e)
    figures = report(drive.records, end_seconds=clock(), targets=targets, warmup_seconds=options.warmup)
    document = {
        "name": options.name,
        "started_at": started_at.isoformat(timespec="seconds"),
        "was_stopped": was_stopped,
        "settings": _settings(options) | {"model": rules.model},
        "most_in_flight": drive.most_in_flight,
        **figures,
    }
    _write(document, drive, options)
    return 130 if was_stopped else 0 if figures["requests"]["succeeded"] else 1


async def _drive(drive: Drive, arrivals: Iterable[Arrival], clock: Stopwatch) -> bool:
    """Whether Ctrl-C ended it."""
    clock.start()
    running = asyncio.create_task(drive.run(arrivals))
    showing = asyncio.create_task(show_progress(drive, clock))
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        running.cancel()
        loop.remove_signal_handler(signal.SIGINT)  # the next one ends the program as it is

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        await asyncio.wait({running})
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        running.cancel()
        showing.cancel()
        await asyncio.wait({running, showing})
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K")
    if not running.cancelled():
        running.result()
    return stopped.is_set()


def _write(document: dict[str, Any], drive: Drive, options: argparse.Namespace) -> None:
    text = json.dumps(document, indent=2)
    to_stdout = options.output is not None and str(options.output) == "-"
    if options.output is not None and not to_stdout:
        options.output.write_text(text + "\n")
    if options.records is not None:
        lines = (json.dumps(asdict(record)) + "\n" for record in drive.records)
        options.records.write_text("".join(lines))
    if to_stdout:
        print(text)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for line in summary_lines(document):
        console.print(line)
    console.print(latency_table(document))


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The flags, without keys."""
    document = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    document["api_key"] = len(options.api_key)
    document["rate"] = str(options.rate) if options.rate == float("inf") else options.rate
    return document


def _compare(paths: Sequence[Path]) -> int:
    if len(paths) < 2:
        print("usage: loadtest compare FIRST.json SECOND.json [...]", file=sys.stderr)
        return 2
    reports: list[tuple[str, dict[str, Any]]] = []
    for path in paths:
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise OSError(f"{path} is no report: {error}") from error
        reports.append((document.get("name") or path.stem, document))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(comparison_table(reports))
    return 0


if __name__ == "__main__":
    # A reader that has seen enough (`| head`) ends the program without a word.
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)
