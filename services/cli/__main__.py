"""kvmesh: the command. `up` starts a mesh; `chat` and `status` talk to a running one."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version

from services.cli.chat import answer_once, converse, opening
from services.cli.gateway import ChatRequest, Gateway, GatewayError
from services.cli.status import show_status

DEFAULT_URL = "http://127.0.0.1:8000"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for an error of the mesh, 2 for a bad command line."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["up"]:
        os.execv(sys.executable, [sys.executable, "-m", "services.up", *words[1:]])
    options = _parser().parse_args(words)
    if options.command == "version":
        print(f"kvmesh {version('kvmesh')}")
        return 0
    gateway = Gateway(options.url, options.api_key)
    try:
        _run(gateway, options)
    except GatewayError as error:
        print(f"kvmesh: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kvmesh chat ... | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        gateway.close()
    return 0


def _run(gateway: Gateway, options: argparse.Namespace) -> None:
    as_json = options.output == "json"
    if options.command == "status":
        show_status(gateway.mesh(), as_json=as_json, out=sys.stdout)
        return
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


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    url = os.environ.get("KVMESH_URL") or DEFAULT_URL
    shared.add_argument("--url", default=url, help=f"the gateway, else $KVMESH_URL (now {url})")
    key = os.environ.get("KVMESH_API_KEY", "")
    shared.add_argument("--api-key", default=key, help="the gateway's key, else $KVMESH_API_KEY")
    shared.add_argument("--output", choices=("text", "json"), default="text", help="for people or programs")
    parser = argparse.ArgumentParser(
        prog="kvmesh", description="Serves language models from a mesh of services."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start the whole mesh on this machine (kvmesh up --help lists its flags)")
    chat = commands.add_parser("chat", parents=[shared], help="ask the mesh; without a prompt, converse")
    chat.add_argument("prompt", nargs="*", help="what to ask; none: read it, or converse on a terminal")
    chat.add_argument("--model", default="", help="which model; none: the first that is served")
    chat.add_argument("--system", default="", help="a system message")
    chat.add_argument("--max-tokens", type=_positive, help="the longest answer in tokens")
    chat.add_argument("--temperature", type=float, help="0 is greedy; none: as the gateway does")
    commands.add_parser("status", parents=[shared], help="services, load, blocks, rates")
    commands.add_parser("version", help="what this is")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
