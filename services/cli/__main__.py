"""kvmesh: the command. `up` starts a mesh; the others talk to a running one."""

import argparse
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from types import FrameType

from libs.config.closed_stdout import tolerate_closed_stdout
from services.cli.admin_key import find_admin_key
from services.cli.arguments import BadCommand, check_alone, move_asked, new_parser
from services.cli.chat import answer_once, converse, opening
from services.cli.explain import show_explanation
from services.cli.gateway import ChatRequest, Gateway, GatewayError
from services.cli.migrate import show_moves, start_move
from services.cli.placement import show_placement
from services.cli.role import change_role
from services.cli.status import show_status


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for an error of the mesh, 2 for a bad command, 130 and 143 by signals; ends
    with 141 where nobody reads what it says any more."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["up"]:
        os.execv(sys.executable, [sys.executable, "-m", "services.up", *words[1:]])
    with tolerate_closed_stdout():
        return _obey(words)


def _obey(words: Sequence[str]) -> int:
    options = new_parser().parse_args(words)
    if options.command == "version":
        print(f"kvmesh {version('kvmesh')}")
        return 0
    admin_key = find_admin_key(options.admin_key, options.url, os.environ) if "admin_key" in options else ""
    gateway = Gateway(options.url, options.api_key, admin_key=admin_key)
    try:
        _run(gateway, options)
    except BadCommand as error:
        print(f"kvmesh: {error}", file=sys.stderr)
        return 2
    except GatewayError as error:
        print(f"kvmesh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        return exit_code_of(interrupt)
    finally:
        gateway.close()
    return 0


def _run(gateway: Gateway, options: argparse.Namespace) -> None:
    as_json = options.output == "json"
    match options.command:
        case "status":
            show_status(gateway.mesh(), as_json=as_json, out=sys.stdout)
        case "placement":
            show_placement(gateway.placement(), as_json=as_json, out=sys.stdout)
        case "explain":
            show_explanation(gateway.explain(options.rounds), as_json=as_json, out=sys.stdout)
        case "migrate":
            with terminable():  # a move goes on without the command, which says so
                _migrate(gateway, options, as_json=as_json)
        case "role":
            waits = sys.stdout.isatty() if options.wait is None else options.wait
            change_role(gateway, options.worker, options.role, waits=waits, as_json=as_json, out=sys.stdout)
        case _:
            _chat(gateway, options, as_json=as_json)


def _migrate(gateway: Gateway, options: argparse.Namespace, *, as_json: bool) -> None:
    if options.list or options.cancel is not None:
        check_alone(options)
    if options.list:
        show_moves(gateway.migrations(), as_json=as_json, out=sys.stdout)
    elif options.cancel is not None:
        cancelled = gateway.cancel_migration(options.cancel)
        print(json.dumps(cancelled) if as_json else f"move {cancelled['id']} is rolled back")
    else:
        asked = move_asked(options)
        waits = sys.stdout.isatty() if options.wait is None else options.wait
        start_move(gateway, asked, waits=waits, as_json=as_json, out=sys.stdout)


def _chat(gateway: Gateway, options: argparse.Namespace, *, as_json: bool) -> None:
    prompt = " ".join(options.prompt)
    if not prompt and sys.stdin.isatty() and not as_json:
        before = [{"role": "system", "content": options.system}] if options.system else []
        request = ChatRequest(before, options.model, options.max_tokens, options.temperature)
        converse(gateway, request, read_line=_read_line, out=sys.stdout)
        return
    messages = opening(prompt or sys.stdin.read(), options.system)
    request = ChatRequest(messages, options.model, options.max_tokens, options.temperature)
    answer_once(gateway, request, as_json=as_json, out=sys.stdout)


def _read_line(prompt: str) -> str:
    with suppress(ImportError):  # where it exists, importing it gives `input` history and editing keys
        importlib.import_module("readline")
    return input(prompt)


class Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """128 and the number of the signal, as shells have it."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


@contextmanager
def terminable() -> Generator[None]:
    """Within it SIGTERM ends a command as Ctrl-C does: it says what goes on without it.

    Signals are the main thread's: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_terminated(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


if __name__ == "__main__":
    raise SystemExit(main())
