"""kvmesh placement: who runs which layers and holds which heads, as a picture in the terminal."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from string import ascii_lowercase, ascii_uppercase
from typing import Any, TextIO

from rich.padding import Padding
from rich.text import Text

from services.cli.console import ReadConsole, size_words

PIPE_WIDTH = 100
"""Columns where nobody's screen sets a limit."""
_RULER_STEP = 10
_LABEL_WIDTH = 12
_LETTERS = ascii_uppercase + ascii_lowercase
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


class Letters:
    """One letter and one colour for each worker, the same all over a picture. In the order in which people
    count: decode-2 before decode-10."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names), key=_counted)
        self._at = {name: at for at, name in enumerate(ordered)}

    def letter(self, name: str) -> str:
        """A to Z, then a to z, then again."""
        return _LETTERS[self._at[name] % len(_LETTERS)]

    def colour(self, name: str) -> str:
        """As rich calls it."""
        return _COLOURS[self._at[name] % len(_COLOURS)]

    def names(self) -> list[str]:
        """All, in order."""
        return list(self._at)


def _counted(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def show_placement(document: dict[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Write what GET /v1/mesh/placement said."""
    if as_json:
        out.write(json.dumps(document, ensure_ascii=False) + "\n")
        return
    instances = document.get("instances") or []
    console = ReadConsole(file=out, highlight=False, markup=False, width=None if out.isatty() else PIPE_WIDTH)
    if not instances:
        console.print("No worker has told its placement yet.")
        return
    letters = Letters(name for instance in instances for name in _workers_of(instance))
    console.print(_legend(letters), soft_wrap=False)
    for instance in instances:
        console.print()
        _show_instance(console, instance, letters)


def _workers_of(instance: dict[str, Any]) -> Iterator[str]:
    yield instance["name"]
    for part in (*instance["layers"], *instance["heads"], *instance["lent"]):
        yield part["worker"]


def _legend(letters: Letters) -> Text:
    legend = Text()
    for name in letters.names():
        legend.append("   " if legend else "")
        legend.append(letters.letter(name), f"bold {letters.colour(name)}")
        legend.append(f" {name}")
    return legend


def _show_instance(console: ReadConsole, instance: dict[str, Any], letters: Letters) -> None:
    name, capacity = instance["name"], instance["capacity"]
    title = Text.assemble((name, f"bold {letters.colour(name)}"), f"  epoch {instance['epoch']}")
    if instance["state"] != "ready":
        title.append(f"  {instance['state']}", "yellow")
    console.print(title)
    for first in range(0, instance["num_layers"], width := _layers_in_a_row(console.width)):
        end = min(first + width, instance["num_layers"])
        console.print(Text(" " * _LABEL_WIDTH + _ruler(first, end), "dim"))
        for heads, holders in _rows(instance, first, end):
            row = Text(f"{heads:<{_LABEL_WIDTH}}", "dim")
            for holder in holders:
                row.append(letters.letter(holder), "dim" if holder == name else letters.colour(holder))
            console.print(row)
    for words in (*_away_words(instance), *_hosted_words(instance), _capacity_words(capacity)):
        console.print(Padding(Text(words), (0, 0, 0, _LABEL_WIDTH), expand=False))


def _rows(instance: dict[str, Any], first: int, end: int) -> Iterator[tuple[str, list[str]]]:
    """Who holds the layers, head by head; heads that are held alike share a row."""
    heads = range(instance["num_kv_heads"])
    held = [[_holder(instance, layer, head) for layer in range(first, end)] for head in heads]
    for holders, group in groupby(heads, key=lambda head: held[head]):
        *_, last = alike = list(group)
        label = f"head {last}" if len(alike) == 1 else f"heads {alike[0]}-{last}"
        yield label, holders


def _layers_in_a_row(width: int) -> int:
    """A multiple of ten that fits beside the row's label."""
    return max(_RULER_STEP, (width - _LABEL_WIDTH) // _RULER_STEP * _RULER_STEP)


def _ruler(first: int, end: int) -> str:
    """Numbers of every tenth layer above its column."""
    marks = (str(layer).ljust(_RULER_STEP) for layer in range(first, end, _RULER_STEP))
    return "".join(marks).rstrip()


def _holder(instance: dict[str, Any], layer: int, head: int) -> str:
    for part in instance["heads"]:
        if part["first"] <= layer < part["end"] and head in part["kv_heads"]:
            return str(part["worker"])
    run = next(run for run in instance["layers"] if run["first"] <= layer < run["end"])
    return str(run["worker"])


def _away_words(instance: dict[str, Any]) -> Iterator[str]:
    for run in instance["layers"]:
        if "move_id" in run:
            last = run["end"] - 1
            is_one = run["first"] == last
            layers = f"layer {last}" if is_one else f"layers {run['first']}-{last}"
            whose = "its" if is_one else "their"
            weights = "" if run["has_weights_at_home"] else f", with {whose} weights"
            yield f"{layers} at {run['worker']}{weights} (move {run['move_id']})"
    for part in (*instance["heads"], *instance["lent"]):
        blocks = f": {part['num_blocks']}" if part["what"] == "lent blocks" else ""
        yield f"{part['what']} at {part['worker']}{blocks} (move {part['move_id']})"


def _hosted_words(instance: dict[str, Any]) -> Iterator[str]:
    for hosted in instance["hosted"]:
        size = size_words(hosted["num_bytes"])
        if hosted["what"] == "lent blocks":
            yield f"lends {hosted['num_blocks']} blocks to {hosted['instance']}, {size}"
        else:
            yield f"hosts {hosted['what']} of {hosted['instance']} in {size}"


def _capacity_words(capacity: dict[str, Any]) -> str:
    num_blocks, num_used = capacity["num_blocks"], capacity["num_used_blocks"]
    if not num_blocks:
        return "capacity not told yet"
    of_memory = f" in {size_words(own)}" if (own := capacity["num_own_bytes"]) else ""
    share = f"{num_used / num_blocks:.0%} in use"
    hosted = f"; {size_words(size)} more for others" if (size := capacity["num_hosted_bytes"]) else ""
    return f"{num_blocks} KV blocks, {capacity['num_tokens']} tokens{of_memory}; {share}{hosted}"
