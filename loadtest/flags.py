"""The command line."""

import argparse
import json
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Loads an OpenAI-compatible server over HTTP and tells how long its answers took. Requests come at their
times, however many are still open. `python -m loadtest compare A.json B.json` prints two saved reports
with their ratios."""


def parser() -> argparse.ArgumentParser:
    """All flags of a run."""
    flags = argparse.ArgumentParser(prog="loadtest", description=DESCRIPTION)
    _server_flags(flags.add_argument_group("the server"))
    _arrival_flags(flags.add_argument_group("when requests come"))
    _prompt_flags(flags.add_argument_group("what they ask"))
    _trace_flags(flags.add_argument_group("or: replay of a trace"))
    _report_flags(flags.add_argument_group("the report"))
    return flags


def check(flags: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with 2 for flags that do not go together."""
    if options.duration is None and options.num is None and options.trace is None:
        flags.error("say how long: --duration SECONDS, --num CONVERSATIONS, or --trace FILE")
    if options.trace is None and options.rate == float("inf") and options.num is None:
        flags.error("an infinite --rate needs --num")
    if options.rate == float("inf") and options.arrivals != "constant":
        flags.error("an infinite --rate goes with --arrivals constant only")
    if options.token_ids and options.api == "chat":
        flags.error("--token-ids needs --api completions")
    if options.token_ids and options.trace is None:
        flags.error("--token-ids needs --trace")


def _server_flags(group: Any) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="with or without /v1 (%(default)s)")
    group.add_argument("--model", default="", help="default: the first that the server lists")
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help="(%(default)s)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="several: taken in turns, as tenants"
    )
    group.add_argument("--temperature", type=_not_negative, default=0.0, help="(%(default)s)")
    group.add_argument(
        "--ignore-eos", action="store_true", help="answers of full length; not all servers can"
    )
    group.add_argument("--no-usage", action="store_true", help="do not ask for usage, for servers without it")
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="sent with all")
    group.add_argument(
        "--timeout", type=_positive, default=600.0, help="the server's longest silence, seconds (%(default)s)"
    )
    group.add_argument(
        "--max-in-flight", type=_natural, default=1024, help="open requests; more are held back (%(default)s)"
    )


def _arrival_flags(group: Any) -> None:
    group.add_argument(
        "--arrivals",
        choices=("constant", "poisson", "bursty", "on-off"),
        default="poisson",
        help="(%(default)s)",
    )
    group.add_argument(
        "--rate", type=_positive, default=1.0, help="conversations per second; inf: all at once (%(default)s)"
    )
    group.add_argument(
        "--burstiness",
        type=_positive,
        default=0.25,
        help="of bursty: 1 is Poisson, less is burstier (%(default)s)",
    )
    group.add_argument("--on", type=_positive, default=2.0, help="of on-off: busy seconds (%(default)s)")
    group.add_argument(
        "--off", type=_not_negative, default=8.0, help="of on-off: quiet seconds (%(default)s)"
    )
    group.add_argument("--duration", type=_positive, help="seconds in which conversations begin")
    group.add_argument("--num", type=_natural, help="conversations")
    group.add_argument("--seed", type=int, default=0, help="same seed, same load (%(default)s)")


def _prompt_flags(group: Any) -> None:
    group.add_argument("--prefix-tokens", type=_natural_or_0, default=512, help="shared (%(default)s)")
    group.add_argument("--suffix-tokens", type=_natural, default=64, help="own, of each turn (%(default)s)")
    group.add_argument("--output-tokens", type=_natural, default=64, help="asked for (%(default)s)")
    group.add_argument(
        "--spread", type=_share, default=0.0, help="0.5: own and output +- 50 %% (%(default)s)"
    )
    group.add_argument("--num-prefixes", type=_natural, default=16, help="(%(default)s)")
    group.add_argument(
        "--zipf", type=_not_negative, default=1.0, help="n-th prefix as n**-ZIPF; 0: all alike (%(default)s)"
    )
    group.add_argument("--turns", type=_natural, default=1, help="of each conversation (%(default)s)")
    group.add_argument("--think", type=_not_negative, default=0.0, help="seconds between turns (%(default)s)")


def _trace_flags(group: Any) -> None:
    group.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake .jsonl or Azure .csv")
    group.add_argument("--speed", type=_positive, default=1.0, help="2: in half the time (%(default)s)")
    group.add_argument("--length-scale", type=_positive, default=1.0, help="of all lengths (%(default)s)")
    group.add_argument("--block-tokens", type=_natural, default=512, help="of a hash id (%(default)s)")
    group.add_argument("--max-input-tokens", type=_natural, help="longer prompts are cut")
    group.add_argument("--max-output-tokens", type=_natural, help="longer answers are not asked for")
    group.add_argument(
        "--token-ids", nargs=2, type=_natural_or_0, metavar=("LOW", "HIGH"),
        help="prompts as token ids of this range: exact lengths, for servers that take them",
    )  # fmt: skip


def _report_flags(group: Any) -> None:
    group.add_argument(
        "--warmup", type=_not_negative, default=0.0, help="seconds that do not count (%(default)s)"
    )
    group.add_argument("--target-ttft", type=_positive, metavar="SECONDS", help="goodput: first token within")
    group.add_argument(
        "--target-tpot", type=_positive, metavar="SECONDS", help="goodput: mean per output token"
    )
    group.add_argument("--target-e2e", type=_positive, metavar="SECONDS", help="goodput: whole answer within")
    group.add_argument("--output", type=Path, metavar="FILE", help="where the JSON report goes; - is stdout")
    group.add_argument("--records", type=Path, metavar="FILE", help="where each request goes, as JSON lines")
    group.add_argument("--name", default="", help="what the report is called in comparisons")


def _number(text: str, minimum: float, *, is_open: bool) -> float:
    number = float(text)
    if not (number > minimum if is_open else number >= minimum):
        raise argparse.ArgumentTypeError(
            f"must be {'more than' if is_open else 'at least'} {minimum:g}, not {text}"
        )
    return number


def _positive(text: str) -> float:
    return _number(text, 0, is_open=True)


def _not_negative(text: str) -> float:
    return _number(text, 0, is_open=False)


def _share(text: str) -> float:
    if (share := _not_negative(text)) > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, not {text}")
    return share


def _natural(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def _natural_or_0(text: str) -> int:
    return 0 if int(text) == 0 else _natural(text)


def _json_object(text: str) -> dict[str, Any]:
    parsed = json.loads(text)
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return parsed
