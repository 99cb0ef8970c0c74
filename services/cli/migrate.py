"""kvmesh migrate: begin a move, follow it through its phases, list moves, cancel one."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from rich.text import Text

from services.cli.console import ReadConsole, size_words
from services.cli.gateway import Gateway, GatewayError

_LOOK_SECONDS = 0.2
_PHASES = ("planned", "reserving", "copying", "catching_up", "switching", "releasing", "rolling_back")


class MoveFailed(GatewayError):
    """It was begun and rolled back; the text says why."""


def start_move(gateway: Gateway, asked: dict[str, Any], *, waits: bool, as_json: bool, out: TextIO) -> None:
    """Begin a move and, where `waits`, follow it to its end. Raises GatewayError, MoveFailed."""
    try:
        accepted = gateway.start_migration(asked)
    except KeyboardInterrupt:
        print("the move may have begun; kvmesh migrate --list tells", file=sys.stderr)
        raise
    if not waits:
        said = (
            json.dumps(accepted)
            if as_json
            else f"move {accepted['id']} begins; kvmesh migrate --list tells how far it is"
        )
        out.write(said + "\n")
        return
    try:
        record = follow_move(gateway, accepted["id"], out=None if as_json else out)
    except (KeyboardInterrupt, BrokenPipeError):
        print(_goes_on_words(accepted["id"]), file=sys.stderr)
        raise
    except GatewayError as error:
        raise GatewayError(f"{error}; {_goes_on_words(accepted['id'])}") from error
    if as_json:
        out.write(json.dumps(record, ensure_ascii=False) + "\n")
    if record["phase"] == "failed":
        raise MoveFailed(f"move {record['id']} failed: {record['error'] or 'nobody said why'}")


def _goes_on_words(move_id: str) -> str:
    return (
        f"move {move_id} goes on without this command: kvmesh migrate --list tells how far it is, and "
        f"kvmesh migrate --cancel {move_id} rolls it back until it has switched"
    )


def follow_move(
    gateway: Gateway,
    move_id: str,
    *,
    out: TextIO | None,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The record of the move when it is over; each phase is written to `out` as it ends."""
    console = ReadConsole(file=out, highlight=False, markup=False, quiet=out is None)
    record = gateway.migration(move_id)
    console.print(f"move {record['id']}: {move_words(record)}", soft_wrap=True)
    shown: set[str] = set()
    with console.status("") as status:
        while True:
            for phase in _ended_phases(record):
                if phase not in shown:
                    shown.add(phase)
                    console.print(f"  {_phase_words(record, phase)}", soft_wrap=True)
            if record["is_over"]:
                break
            status.update(f"{_words(record['phase'])}  {progress_words(record)}")
            pause(_LOOK_SECONDS)
            record = gateway.migration(move_id)
    if record["phase"] == "done":
        console.print(_result_words(record), soft_wrap=True)
    return record


def show_moves(document: dict[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Write what GET /v1/mesh/migrations said."""
    if as_json:
        out.write(json.dumps(document, ensure_ascii=False) + "\n")
        return
    moves = document.get("data") or []
    if not moves:
        out.write("There was no move yet.\n")
        return
    console = ReadConsole(file=out, highlight=False, markup=False)
    for move in moves:
        style = {"done": "green", "failed": "red"}.get(move["phase"], "yellow")
        started = time.strftime("%H:%M:%S", time.localtime(move["started_unix_seconds"]))
        title = Text.assemble((move["id"], "bold"), f"  {started}  ", (_words(move["phase"]), style))
        console.print(title, soft_wrap=True)
        figures = ", ".join(filter(None, _list_figures(move)))
        for words in (move_words(move), figures, move["error"]):
            if words:
                console.print(Text("  " + words), soft_wrap=True)


def move_words(move: dict[str, Any]) -> str:
    """`layers 20-29 of decode-0 to prefill-0 (migrate)`."""
    instance, host = (move[f"{who}_name"] or move[who] for who in ("instance", "host"))
    if move["is_return"]:
        return f"{move['what']} of {instance} home from {host}"
    kind = f" ({move['kind']})" if move["kind"] in ("migrate", "offload") else ""
    return f"{move['what']} of {instance} to {host}{kind}"


def progress_words(record: dict[str, Any]) -> str:
    """How far it is: `42% of 80 MiB: KV 4 MiB, weights 30 MiB`."""
    num_bytes = record["num_kv_bytes"] + record["num_weight_bytes"]
    if not (num_total_bytes := record.get("num_total_bytes", 0)):
        return _size_words(record) if num_bytes else ""
    share = f"{min(1.0, num_bytes / num_total_bytes):.0%} of {size_words(num_total_bytes)}"
    return f"{share}: {_size_words(record)}"


def _ended_phases(record: dict[str, Any]) -> Iterator[str]:
    """Those whose time is known, in the order of their course, but the one that it is in."""
    seconds = record["phase_seconds"]
    return (phase for phase in _PHASES if phase in seconds and phase != record["phase"])


def _phase_words(record: dict[str, Any], phase: str) -> str:
    seconds = f"{record['phase_seconds'][phase]:.2f} s"
    figures = {
        "copying": _size_words(record),
        "catching_up": f"{record['num_rounds']} round{'' if record['num_rounds'] == 1 else 's'}",
        "switching": f"pause {1000 * record['pause_seconds']:.1f} ms",
    }
    return f"{_words(phase):<13}{seconds:>9}  {figures.get(phase, '')}".rstrip()


def _size_words(record: dict[str, Any]) -> str:
    weights = f", weights {size_words(record['num_weight_bytes'])}" if record["num_weight_bytes"] else ""
    return f"KV {size_words(record['num_kv_bytes'])}{weights}"


def _result_words(record: dict[str, Any]) -> str:
    home = record["instance_name"] or record["instance"]
    blocks = _blocks_words(record) or "its KV blocks are not known"
    return f"done in {_took(record)}; {home}: {blocks}, epoch {record['epoch']}"


def _blocks_words(record: dict[str, Any]) -> str:
    """Empty where they are not known, or not yet."""
    before, after = record["num_blocks_before"], record["num_blocks_after"]
    if not before or not after:
        return ""
    if before == after:
        return f"{after} KV blocks as before"
    return f"{before} -> {after} ({after / before - 1:+.0%}) KV blocks"


def _took(record: dict[str, Any]) -> str:
    if not record["ended_unix_seconds"]:
        return ""
    return f"{max(0.0, record['ended_unix_seconds'] - record['started_unix_seconds']):.2f} s"


def _list_figures(move: dict[str, Any]) -> Iterator[str]:
    if took := _took(move):
        yield took
    if move["pause_seconds"]:
        yield f"pause {1000 * move['pause_seconds']:.1f} ms"
    if not move["is_over"]:
        yield progress_words(move)
    elif move["num_kv_bytes"] or move["num_weight_bytes"]:
        yield _size_words(move)
    if blocks := _blocks_words(move):
        yield blocks
    if move["reason"]:
        yield move["reason"]


def _words(phase: str) -> str:
    return phase.replace("_", " ")
