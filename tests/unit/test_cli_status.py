"""The mesh as a table."""

import io
import json

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
    for said in ("router ready", "decode-0 starting", "50/200 (25%)", "123.5", "50%", "cd"):
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
