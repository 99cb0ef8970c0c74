"""The command line of kvmesh, and what it asks the gateway to move."""

import argparse
import os
from typing import Any

DEFAULT_URL = "http://127.0.0.1:8000"


class BadCommand(Exception):
    """Words that do not go together; the text is one line for a person."""


def new_parser() -> argparse.ArgumentParser:
    """All commands with their flags."""
    parser = argparse.ArgumentParser(
        prog="kvmesh", description="Serves language models from a mesh of services."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start the whole mesh on this machine (kvmesh up --help lists its flags)")
    shared = _shared()
    chat = commands.add_parser("chat", parents=[shared], help="ask the mesh; without a prompt, converse")
    chat.add_argument("prompt", nargs="*", help="what to ask; none: read it, or converse on a terminal")
    chat.add_argument("--model", default="", help="which model; none: the first that is served")
    chat.add_argument("--system", default="", help="a system message")
    chat.add_argument("--max-tokens", type=_positive, help="the longest answer in tokens")
    chat.add_argument("--temperature", type=float, help="0 is greedy; none: as the gateway does")
    commands.add_parser("status", parents=[shared], help="services, load, blocks, rates")
    commands.add_parser("placement", parents=[shared], help="who runs which layers and holds which heads")
    _add_migrate(commands.add_parser("migrate", parents=[shared], help="move layers, heads or blocks, live"))
    _add_role(commands.add_parser("role", parents=[shared], help="change what a worker does, in place"))
    explain = commands.add_parser("explain", parents=[shared], help="why modules moved or stayed")
    explain.add_argument("--rounds", type=_positive, default=20, help="of the loop, the last so many")
    commands.add_parser("version", help="what this is")
    return parser


def move_asked(options: argparse.Namespace) -> dict[str, Any]:
    """The body of POST /v1/mesh/migrations. Raises BadCommand."""
    is_return = options.return_of is not None
    if not options.instance and not is_return:
        raise BadCommand("which instance? kvmesh migrate INSTANCE --to HOST --layers 20:30 (or --list)")
    ways = [options.layers or options.heads, options.tokens, is_return]
    if sum(map(bool, ways)) != 1:
        several = ", not several" if any(ways) else ""
        raise BadCommand(f"give one of --layers, --heads (of --layers), --tokens, --return{several}")
    if bool(options.to) == is_return:
        raise BadCommand("--return needs no --to" if is_return else "where to? give --to HOST")
    asked = {
        "instance": options.instance,
        "host": options.to,
        "layers": options.layers,
        "kv_heads": options.heads,
        "tokens": options.tokens or None,
        "num_blocks": options.blocks,
        "return_of": options.return_of,
        "kind": options.kind,
        "expected_epoch": options.expected_epoch,
    }
    return {name: value for name, value in asked.items() if value is not None}


def check_alone(options: argparse.Namespace) -> None:
    """--list and --cancel say nothing of a module. Raises BadCommand."""
    flag = "--list" if options.list else "--cancel MOVE_ID"
    asked = (options.to, options.layers, options.heads, options.return_of, options.blocks, options.kind)
    if options.instance or options.tokens or any(one is not None for one in (*asked, options.expected_epoch)):
        raise BadCommand(f"{flag} stands alone: leave out the instance, --to, and what says what is to move")


def _shared() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    url = os.environ.get("KVMESH_URL") or DEFAULT_URL
    shared.add_argument("--url", default=url, help=f"the gateway, else $KVMESH_URL (now {url})")
    key = os.environ.get("KVMESH_API_KEY", "")
    shared.add_argument("--api-key", default=key, help="the gateway's key, else $KVMESH_API_KEY")
    shared.add_argument("--output", choices=("text", "json"), default="text", help="for people or programs")
    return shared


def _add_migrate(migrate: argparse.ArgumentParser) -> None:
    migrate.add_argument("instance", nargs="?", help="whose module: a worker, by name or incarnation")
    migrate.add_argument("--to", metavar="HOST", help="the worker that it moves to")
    migrate.add_argument("--layers", type=_layers, metavar="FIRST:END", help="layers, the end not among them")
    migrate.add_argument(
        "--kind", choices=("migrate", "offload"), help="weights travel, or are there already"
    )
    migrate.add_argument("--heads", type=_heads, metavar="1,2", help="KV heads, of --layers or of all layers")
    migrate.add_argument("--tokens", action="store_true", help="whole blocks that the host lends")
    migrate.add_argument(
        "--blocks", type=_positive, help="that the host is to hold or lend; none: what it can spare"
    )
    migrate.add_argument(
        "--return", dest="return_of", metavar="MOVE_ID", help="what it brought away comes home"
    )
    migrate.add_argument("--expected-epoch", type=int, help="only if the placement still has it")
    migrate.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, help="follow it to its end; default: on a terminal"
    )
    others = migrate.add_mutually_exclusive_group()
    others.add_argument("--list", action="store_true", help="moves under way and past")
    others.add_argument("--cancel", metavar="MOVE_ID", help="roll a move back, if it has not switched")
    _add_admin_key(migrate)


def _add_role(role: argparse.ArgumentParser) -> None:
    role.add_argument("worker", help="by name or incarnation")
    role.add_argument("role", choices=("prefill", "decode", "both"), help="what it does from then on")
    role.add_argument(
        "--wait", action=argparse.BooleanOptionalAction, help="until it is ready; default: on a terminal"
    )
    _add_admin_key(role)


def _add_admin_key(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--admin-key", default="", help="else $KVMESH_ADMIN_KEY, else what `kvmesh up` left on this machine"
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return number


def _layers(text: str) -> list[int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"must be FIRST:END, as 20:30 for layers 20 to 29, not {text!r}")
    return [int(first), int(end)]


def _heads(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers with commas, as 1,2, not {text!r}")
    return [int(part) for part in parts]
