"""kvmesh status: the mesh as a table, or as JSON."""

import json
from typing import Any, TextIO

from rich.table import Table

from services.cli.console import ReadConsole
from services.cli.role import role_of

_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow"}

_GIB = 1 << 30

_PIPE_WIDTH = 160
"""Columns where nobody's screen sets a limit."""


def show_status(mesh: dict[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Write what GET /v1/mesh said."""
    if as_json:
        out.write(json.dumps(mesh, ensure_ascii=False) + "\n")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("service", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for title in ("running", "waiting", "arriving", "blocks", "tokens/s", "busy"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("incarnation")
    table.add_column("detail", overflow="fold")
    for service in mesh.get("services", []):
        state = str(service.get("state", "?"))
        coloured = f"[{_COLOURS.get(state, 'red')}]{state}[/]"
        facts = [str(service.get("incarnation", "")), str(service.get("detail", ""))]
        name, load = str(service.get("name", "?")), service.get("load")
        table.add_row(name, coloured, role_of(service), *load_cells(load), *facts)
    if any((totals := mesh.get("totals") or {}).values()):
        table.add_row("[bold]all[/]", "", "", *load_cells(totals))
    console = ReadConsole(file=out, highlight=False, width=None if out.isatty() else _PIPE_WIDTH)
    console.print(table)
    tiers = [(service, tier) for service in mesh.get("services", []) for tier in _tiers(service)]
    if tiers:
        console.print()
        console.print(_stores_table(tiers))


def _tiers(service: dict[str, Any]) -> list[dict[str, Any]]:
    return (service.get("load") or {}).get("tiers") or []


def _stores_table(tiers: list[tuple[dict[str, Any], dict[str, Any]]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("store", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for title in ("blocks", "GiB", "of GiB", "hit blocks", "of asked"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("detail")
    for store, tier in tiers:
        table.add_row(str(store.get("name", "?")), *tier_cells(tier))
    return table


def tier_cells(tier: dict[str, Any]) -> list[str]:
    """tier, blocks, GiB, capacity, hits, their share of all blocks asked for, detail."""
    num_hit, num_asked = tier["num_hit_blocks"], tier["num_asked_blocks"]
    return [
        str(tier["tier"]),
        str(tier["num_blocks"]),
        f"{tier['num_bytes'] / _GIB:.2f}",
        f"{tier['capacity_bytes'] / _GIB:.2f}",
        str(num_hit),
        f"{num_hit / num_asked:.1%}" if num_asked else "",
        "takes no writes for now" if tier["is_paused"] else "",
    ]


def load_cells(load: dict[str, Any] | None) -> list[str]:
    """running, waiting, arriving, blocks, tokens/s, busy; empty for a service that reports no load."""
    if not load:
        return [""] * 6
    num_blocks, num_used = int(load.get("num_blocks", 0)), int(load.get("num_used_blocks", 0))
    share = f" ({num_used / num_blocks:.0%})" if num_blocks else ""
    return [
        str(load.get("num_running", 0)),
        str(load.get("num_waiting", 0)),
        str(load.get("num_reserved", 0)),
        f"{num_used}/{num_blocks}{share}" if num_blocks else "",
        f"{load.get('tokens_per_second', 0.0):.1f}",
        f"{load['busy_share']:.0%}" if "busy_share" in load else "",
    ]
