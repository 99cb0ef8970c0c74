"""The mesh as a table."""

import io
import json

import httpx
import pytest

from services.cli.gateway import Gateway
from services.cli.status import load_cells, show_status
from services.cli.tiers import as_json, tiers_of

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


EXPOSITION = """\
# HELP kvmesh_store_tier_blocks Blocks in each tier.
# TYPE kvmesh_store_tier_blocks gauge
kvmesh_store_tier_blocks{tier="disk"} 900.0
kvmesh_store_tier_blocks{tier="dram"} 100.0
# TYPE kvmesh_store_tier_bytes gauge
kvmesh_store_tier_bytes{tier="disk"} 3221225472.0
kvmesh_store_tier_bytes{tier="dram"} 1073741824.0
# TYPE kvmesh_store_tier_capacity_bytes gauge
kvmesh_store_tier_capacity_bytes{tier="disk"} 4294967296.0
# TYPE kvmesh_store_tier_hits_total counter
kvmesh_store_tier_hits_total{tier="dram"} 30.0
kvmesh_store_tier_hits_total{tier="disk"} 10.0
# TYPE kvmesh_store_queried_blocks_total counter
kvmesh_store_queried_blocks_total 80.0
# TYPE kvmesh_store_disk_paused gauge
kvmesh_store_disk_paused 1.0
# TYPE kvmesh_kv_transfer_seconds histogram
kvmesh_kv_transfer_seconds_bucket{le="+Inf"} 3.0
kvmesh_kv_transfer_seconds_sum 1.5
"""


def store(**facts: object) -> dict[str, object]:
    return {
        "kind": "kv_store",
        "name": "store-0",
        "incarnation": "ef",
        "state": "ready",
        "load": None,
        **facts,
    }


def test_a_stores_metrics_tell_its_tiers_the_fastest_first() -> None:
    dram, disk = tiers_of(EXPOSITION)
    assert (dram.tier, dram.num_blocks, dram.num_bytes, dram.capacity_bytes) == ("dram", 100, 1 << 30, 0)
    assert (disk.tier, disk.num_blocks, disk.capacity_bytes) == ("disk", 900, 4 << 30)
    assert (dram.num_hit_blocks, dram.hit_share, disk.hit_share) == (30, 0.375, 0.125)
    assert (dram.is_paused, disk.is_paused) == (False, True)


def test_metrics_without_tiers_or_of_a_store_that_nobody_asked_yet_are_taken() -> None:
    assert tiers_of("") == []
    (dram,) = tiers_of('kvmesh_store_tier_blocks{tier="dram"} 0\n')
    assert dram.hit_share is None
    with pytest.raises(ValueError, match="convert"):
        tiers_of("<html>no metrics</html> {")


def test_stores_are_asked_without_the_key_and_may_be_out_of_reach() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/mesh":
            stores = [store(http_address=f"http://{host}") for host in ("here", "away", "broken")]
            return httpx.Response(200, json={"services": [*stores, *MESH["services"]]})
        assert "authorization" not in request.headers
        if request.url.host == "away":
            raise httpx.ConnectError("refused")
        return httpx.Response(200 if request.url.host == "here" else 500, text=EXPOSITION)

    gateway = Gateway("http://gateway", "key", httpx.MockTransport(answer))
    here, away, broken, *others = gateway.mesh_with_tiers()["services"]
    gateway.close()
    assert here["tiers"] == as_json(tiers_of(EXPOSITION))
    assert (away["tiers"], broken["tiers"]) == (None, None)
    assert not any("tiers" in service for service in others)


def test_each_tier_of_a_store_is_a_row() -> None:
    lines = table({"services": [store(tiers=as_json(tiers_of(EXPOSITION)))]})
    rows = [line.split() for line in lines]
    assert ["store-0", "dram", "100", "1.00", "30", "37.5%"] in rows
    disk = ["store-0", "disk", "900", "3.00", "4.00", "10", "12.5%"]
    assert [*disk, "takes", "no", "writes", "for", "now"] in rows


def test_a_store_out_of_reach_is_said_to_be() -> None:
    assert "its metrics cannot be reached from here" in table({"services": [store(tiers=None)]})[-1]
    assert len(table({"services": [store()]})) == 2
