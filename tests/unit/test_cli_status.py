"""The mesh as a table."""

import io
import json

import pytest

from services.cli.status import load_cells, show_status

LOAD = {
    "num_running": 3, "num_waiting": 1, "num_reserved": 2, "num_blocks": 200, "num_used_blocks": 50,
    "tokens_per_second": 123.45, "busy_share": 0.5,
}  # fmt: skip
MESH = {
    "services": [
        {"kind": "router", "name": "router", "incarnation": "ab", "state": "ready", "load": None},
        {"kind": "decode_worker", "name": "decode-0", "incarnation": "cd", "state": "starting",
         "detail": "loading weights 40%", "load": LOAD},
    ]
}  # fmt: skip


def table(mesh: dict[str, object]) -> list[str]:
    out = io.StringIO()
    show_status(mesh, as_json=False, out=out)
    return out.getvalue().splitlines()


def test_each_service_is_a_row_with_its_state_and_load() -> None:
    header, *rows = table({**MESH, "totals": {"num_running": 3, "tokens_per_second": 123.45}})
    assert len([row for row in rows if row.startswith(("router", "decode-0"))]) == 2
    text = " ".join(" ".join(rows).split())
    assert header.startswith("service")
    assert rows[-1].split() == ["all", "3", "0", "0", "123.5"]
    for said in ("router ready", "decode-0 starting decode", "50/200 (25%)", "123.5", "50%", "cd"):
        assert said in text


def test_an_empty_mesh_is_an_empty_table() -> None:
    assert len(table({"services": []})) == 1


def test_json_is_what_the_gateway_said() -> None:
    out = io.StringIO()
    show_status(MESH, as_json=True, out=out)
    assert json.loads(out.getvalue()) == MESH


def test_a_service_without_load_has_empty_cells() -> None:
    assert load_cells(None) == [""] * 6
    assert load_cells({})[3] == ""


TIERS = [
    {"tier": "dram", "num_blocks": 100, "num_bytes": 1 << 30, "capacity_bytes": 2 << 30, "num_hit_blocks": 30,
     "num_asked_blocks": 80, "is_paused": False},
    {"tier": "disk", "num_blocks": 900, "num_bytes": 3 << 30, "capacity_bytes": 4 << 30, "num_hit_blocks": 10,
     "num_asked_blocks": 80, "is_paused": True},
]  # fmt: skip


def store(**facts: object) -> dict[str, object]:
    return {
        "kind": "kv_store",
        "name": "store-0",
        "incarnation": "ef",
        "state": "ready",
        "load": None,
        **facts,
    }


def test_each_tier_of_a_store_is_a_row() -> None:
    lines = table({"services": [store(load={"tiers": TIERS})]})
    rows = [line.split() for line in lines]
    assert ["store-0", "dram", "100", "1.00", "2.00", "30", "37.5%"] in rows
    disk = ["store-0", "disk", "900", "3.00", "4.00", "10", "12.5%"]
    assert [*disk, "takes", "no", "writes", "for", "now"] in rows


def test_a_store_that_nobody_asked_yet_has_no_hit_rate() -> None:
    tiers = [{**TIERS[0], "num_hit_blocks": 0, "num_asked_blocks": 0}]
    *_, row = table({"services": [store(load={"tiers": tiers})]})
    assert row.split() == ["store-0", "dram", "100", "1.00", "2.00", "0"]


@pytest.mark.parametrize("load", [None, {}, {"tiers": []}])
def test_without_tiers_there_is_one_table(load: object) -> None:
    assert len(table({"services": [store(load=load)]})) == 2
