"""kvmesh explain: what the coordinator's loop saw, considered and did, round by round, in 80 columns."""

import json
import re
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from rich.text import Text

from services.cli.console import ReadConsole

_WIDTH = 80
_FIGURE = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?![\w-]|\.\d)")
"""Not the number in a name, as in decode-0, nor of layers, as in 20-29."""


def show_explanation(document: dict[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Write what GET /v1/mesh/explain said; for people the newest round comes last."""
    if as_json:
        out.write(json.dumps(document, ensure_ascii=False) + "\n")
        return
    console = ReadConsole(file=out, highlight=False, markup=False, width=_WIDTH)
    mode = (
        "it moves modules by itself" if document["is_automatic"] else "it only watches, modules move by hand"
    )
    console.print(Text(f"{document['leader']} leads; {mode}", "bold"), soft_wrap=True)
    rounds = list(reversed(document.get("rounds") or []))
    if not rounds:
        console.print("There was no round yet.")
    for run in _same_in_a_row(rounds):
        console.print()
        for line in _round_lines(run):
            console.print(line, soft_wrap=True)


def _same_in_a_row(rounds: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rounds in which nothing was considered, with the same decision but for figures, are shown together."""
    run: list[dict[str, Any]] = []
    for each in rounds:
        if run and not (_is_quiet(each) and _is_quiet(run[-1]) and _kind_of(each) == _kind_of(run[-1])):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def _is_quiet(one_round: dict[str, Any]) -> bool:
    return not one_round["candidates"] and not one_round["move_id"]


def _kind_of(one_round: dict[str, Any]) -> str:
    return shape_of(one_round["decision"])


def _round_lines(run: list[dict[str, Any]]) -> Iterator[Text]:
    last = run[-1]
    numbers = f"round {last['number']}" if len(run) == 1 else f"rounds {run[0]['number']}-{last['number']}"
    at = " to ".join(dict.fromkeys(_clock(each["unix_seconds"]) for each in (run[0], last)))
    state = "balancing" if last["is_balancing"] else "balanced"
    yield Text.assemble((numbers, "bold"), f"  {at}  gap {last['gap']:.2f}, {state}")
    if last["devices"]:
        header = f"  {'worker':<16}{'role':<9}{'compute':>8}{'memory':>8}{'queue':>8}{'load':>8}"
        yield Text(header, "dim")
    for device in last["devices"]:
        yield Text(_device_line(device))
    names = {device["worker"]: device["name"] for device in last["devices"] if device["name"]}
    for alike in _refused_alike(last["candidates"]):
        yield from _candidates_lines(alike, names)
    style = "green" if last["move_id"] else ""
    moved = f" (move {last['move_id']})" if last["move_id"] else ""
    yield from _wrapped(f"{last['decision']}{moved}", "  => ", style)


def _device_line(device: dict[str, Any]) -> str:
    name = device["name"] or device["worker"]
    role = str(device["role"]).removesuffix("_worker")
    shares = "".join(f"{device[what]:>8.0%}" for what in ("compute", "memory", "queue"))
    return f"  {name[:15]:<16}{role[:8]:<9}{shares}{device['utilization']:>8.2f}"


def _refused_alike(candidates: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Those of one instance with the same verdict but for figures, in order."""
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for candidate in candidates:
        alike.setdefault((candidate["instance"], shape_of(candidate["verdict"])), []).append(candidate)
    return alike.values()


def _candidates_lines(alike: list[dict[str, Any]], names: dict[str, str]) -> Iterator[Text]:
    instance = names.get(alike[0]["instance"], alike[0]["instance"])
    is_taken = alike[0]["verdict"] == "taken"
    for hosts, modules in _by_hosts(alike, names).items():
        to = f" to {hosts}" if hosts else ""
        yield from _wrapped(f"{instance}: {modules}{to}", "  + " if is_taken else "  - ", "")
    yield from _wrapped(as_one([_figures(one) for one in alike]), "      ", "dim")
    verdict = as_one([one["verdict"] for one in alike])
    yield from _wrapped(verdict, "      ", "green" if is_taken else "yellow")


def _by_hosts(alike: list[dict[str, Any]], names: dict[str, str]) -> dict[str, str]:
    """What would go where: modules by hosts, hosts to which the same would go together."""
    modules: dict[str, list[str]] = {}
    for one in alike:
        modules.setdefault(one["host"], []).append(one["what"])
    hosts: dict[str, list[str]] = {}
    for host, what in modules.items():
        hosts.setdefault("; ".join(what), []).append(names.get(host, host))
    return {", ".join(together): what for what, together in hosts.items()}


def _figures(candidate: dict[str, Any]) -> str:
    return (
        f"benefit {candidate['benefit']:.3f}, cost {candidate['cost']:.3f}, takes "
        f"{candidate['move_seconds']:.2f} s, adds {1000 * candidate['overhead_seconds']:.2f} ms to a step"
    )


def _wrapped(words: str, indent: str, style: str) -> Iterator[Text]:
    lines = textwrap.wrap(words, _WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent))
    return (Text(line, style) for line in lines or [indent])


def _clock(unix_seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_seconds))


def shape_of(line: str) -> str:
    """The line without its figures."""
    return _FIGURE.sub("#", line)


def as_one(lines: Sequence[str]) -> str:
    """Lines of one shape; a figure in which they differ becomes its range: `cost 0.05 to 0.31`."""
    columns = iter(list(zip(*(_FIGURE.findall(line) for line in lines), strict=True)))

    def merged(_: re.Match[str]) -> str:
        figures = sorted(next(columns), key=float)
        least, greatest = figures[0], figures[-1]
        return least if float(least) == float(greatest) else f"{least} to {greatest}"

    return _FIGURE.sub(merged, lines[0])
