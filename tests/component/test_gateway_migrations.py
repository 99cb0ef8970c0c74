"""Moves and placements over HTTP, workers and a coordinator answering on the bus."""

from typing import Any

import msgspec
import pytest
from gateway_coordinator import (
    DECODE,
    HEADS_AWAY,
    LAYERS_AWAY,
    NUM_LAYERS,
    PREFILL,
    Coordinator,
    Owners,
    at_home,
    candidate,
    done,
    hosted,
    order,
    record,
    seen,
    told,
    without_ids,
)
from gateway_mesh import Mesh
from gateway_moves import ADMIN_KEY, LAYERS, MIGRATIONS, ask, error_of, start, tell_placement

from libs.bus.messages.migration import (
    CancelMigration,
    DenialReason,
    ExplainRounds,
    MigrationDenied,
    MigrationUpdate,
)
from libs.config.errors import BadSetting
from libs.cost.load import WorkerLoad
from libs.placement.migration import MigrationPhase
from libs.placement.module import heads_of, remote_blocks, whole_layers
from services.gateway.settings import GatewaySettings

API_KEY = "sk-one"


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", [settings], indirect=True, ids=[",".join(settings)])


async def test_a_move_is_begun_and_its_address_told(mesh: Mesh, owners: Owners) -> None:
    owners.begins = record(host_name="prefill-0")
    await tell_placement(mesh, told(at_home()))
    answer = await start(mesh, **LAYERS, expected_epoch=0)
    (asked,) = owners.asked
    assert (answer.status_code, answer.json()) == (202, {"id": asked.move_id, "epoch": 0})
    assert asked.move_id.startswith("manual-")
    assert without_ids(owners.asked) == [order(module=whole_layers(20, 30), with_weights=True)]
    found = (await ask(mesh, "GET", answer.headers["location"])).json()
    assert {name: found[name] for name in ("id", "what", "instance_name", "host_name", "is_over")} == {
        "id": asked.move_id, "what": "layers 20-29", "instance_name": "decode-0", "host_name": "prefill-0",
        "is_over": False,
    }  # fmt: skip


MODULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layers": [0, 1], "kind": "offload"}, {"module": whole_layers(0, 1)}),
    ({"layers": [0, 1], "kind": "migrate"}, {"module": whole_layers(0, 1), "with_weights": True}),
    ({"kv_heads": [2, 1]}, {"module": heads_of(0, NUM_LAYERS, (1, 2))}),
    ({"kv_heads": [0], "layers": [3, 9]}, {"module": heads_of(3, 9, (0,))}),
    (
        {"layers": [0, 2], "num_blocks": 9},
        {"module": whole_layers(0, 2), "with_weights": True, "num_blocks": 9},
    ),
    ({"tokens": True}, {"module": remote_blocks(NUM_LAYERS)}),
    ({"tokens": True, "num_blocks": 7}, {"module": remote_blocks(NUM_LAYERS), "num_blocks": 7}),
    ({"return_of": "h1", "host": None}, {"returned_move_id": "h1", "host": ""}),
    ({"return_of": "h1", "host": None, "instance": None}, {"returned_move_id": "h1", "host": ""}),
]


@pytest.mark.parametrize(("asked", "meant"), MODULES, ids=[str(asked) for asked, _ in MODULES])
async def test_each_kind_of_module_is_asked_for_as_it_is(
    mesh: Mesh, owners: Owners, asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    await tell_placement(mesh, told(HEADS_AWAY))
    answer = await start(mesh, **{"instance": DECODE, "host": PREFILL, **asked})
    assert answer.status_code == 202, answer.text
    assert without_ids(owners.asked) == [order(expected_epoch=1, **meant)]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layers": None}, "layers"),
    ({"layers": [5, 5]}, "layers"),
    ({"layers": [5, 2]}, "layers"),
    ({"layers": [-1, 2]}, "layers[0]"),
    ({"layers": [1, 2, 3]}, "layers"),
    ({"layers": "0-3"}, "layers"),
    ({"layers": None, "kv_heads": []}, "kv_heads"),
    ({"kv_heads": [1, 1]}, "kv_heads"),
    ({"kv_heads": [0], "kind": "migrate"}, "kind"),
    ({"tokens": True}, "layers"),
    ({"return_of": "m0"}, "return_of"),
    ({"layers": None, "return_of": "m0"}, "host"),
    ({"host": None}, "host"),
    ({"host": "decode-0"}, "host"),
    ({"host": ""}, "host"),
    ({"layers": None, "host": None, "return_of": "m0", "num_blocks": 3}, "num_blocks"),
    ({"layers": None, "tokens": True, "num_blocks": 0}, "num_blocks"),
    ({"num_blocks": 2**64}, "num_blocks"),
    ({"kind": "teleport"}, "kind"),
    ({"expected_epoch": -1}, "expected_epoch"),
    ({"expected_epoch": 2**64}, "expected_epoch"),
    ({"expected_epoch": "1"}, "expected_epoch"),
    ({"instance": None}, "instance"),
    ({"instance": ""}, "instance"),
    ({"instance": None, "layers": None, "host": None, "return_of": ""}, "return_of"),
    ({"instance": None, "layers": None, "host": None, "return_of": "m" * 257}, "return_of"),
    ({"speed": 9}, "speed"),
]


async def test_what_makes_no_move_is_400_by_name_and_begins_nothing(mesh: Mesh, owners: Owners) -> None:
    await tell_placement(mesh, told(at_home()))
    for change, param in BAD:
        answer = await start(mesh, **{**LAYERS, **change})
        assert (answer.status_code, error_of(answer)["param"]) == (400, param), (change, answer.text)
    for broken in (b"{", b"[]", b"\xff"):
        async with mesh.http() as http:
            headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
            answer = await http.post(MIGRATIONS, content=broken, headers=headers)
        assert answer.status_code == 400
    assert owners.asked == []


async def test_without_a_coordinator_moves_are_made_and_only_its_loop_is_not_explained(
    mesh: Mesh, owners: Owners
) -> None:
    await tell_placement(mesh, told(HEADS_AWAY))
    begun = await start(mesh, **LAYERS)
    assert begun.status_code == 202
    assert (await ask(mesh, "DELETE", begun.headers["location"])).status_code == 202
    answer = await ask(mesh, "GET", "/v1/mesh/explain")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "no_coordinator")
    assert answer.headers["retry-after"] == "2"
    assert len(owners.asked) == 2


async def test_the_moves_heard_of_are_told_newest_first(mesh: Mesh) -> None:
    await mesh.bus.publish(MigrationUpdate(record=record(move_id="m7")))
    back = done(move_id="m8", started_unix_seconds=2000.0, is_return=True)
    away = done(move_id="m6", started_unix_seconds=500.0)
    await tell_placement(mesh, told(at_home(), moves=(away, back)))
    listed = (await ask(mesh, "GET", MIGRATIONS)).json()
    assert [(m["id"], m["kind"], m["is_over"]) for m in listed["data"]] == [
        ("m8", "return", True),
        ("m7", "offload", False),
        ("m6", "migrate", True),
    ]
    assert listed["data"][2] | {"num_blocks_after": 1200, "pause_seconds": 0.0083} == listed["data"][2]
    assert (await ask(mesh, "GET", MIGRATIONS + "/m7")).json()["phase"] == "copying"
    missing = await ask(mesh, "GET", MIGRATIONS + "/m9")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "migration_not_found")


async def test_a_move_whose_owner_left_stays_in_the_list(mesh: Mesh) -> None:
    facts = {"started_unix_seconds": 2000.0, "ended_unix_seconds": 2001.0}
    lost = record(
        MigrationPhase.FAILED, move_id="m2", error="its home left the mesh", instance="gone", **facts
    )
    await mesh.bus.publish(MigrationUpdate(record=lost))
    await tell_placement(mesh, told(at_home(), moves=(record(move_id="m1"),)))
    listed = (await ask(mesh, "GET", MIGRATIONS)).json()["data"]
    assert [(m["id"], m["phase"]) for m in listed] == [("m2", "failed"), ("m1", "copying")]


async def test_a_move_is_cancelled_unless_it_is_unknown_or_has_switched(mesh: Mesh, owners: Owners) -> None:
    await tell_placement(mesh, told(at_home(), moves=(record(),)))
    answer = await ask(mesh, "DELETE", MIGRATIONS + "/m1")
    assert (answer.status_code, answer.json()) == (202, {"id": "m1", "epoch": 0})
    assert owners.asked == [CancelMigration(move_id="m1")]
    assert (await ask(mesh, "DELETE", MIGRATIONS + "/m9")).status_code == 404
    owners.answer = MigrationDenied(reason=DenialReason.INVALID, detail="it has switched", epoch=3)
    late = await ask(mesh, "DELETE", MIGRATIONS + "/m1")
    assert (late.status_code, error_of(late)["epoch"]) == (409, 3)


async def test_the_blocks_told_are_those_of_the_placement_whatever_was_reported_before_or_after(
    mesh: Mesh,
) -> None:
    cases = ((800, 1200, 1200), (1200, 700, 700), (900, 0, 900))
    for epoch, (reported, told_blocks, shown) in enumerate(cases, start=1):
        await mesh.decodes[0].report(WorkerLoad(num_blocks=reported, num_used_blocks=750, block_size=16))
        placement = msgspec.structs.replace(LAYERS_AWAY, epoch=epoch)
        await tell_placement(mesh, told(placement, num_blocks=told_blocks))
        (instance,) = (await ask(mesh, "GET", "/v1/mesh/placement")).json()["instances"]
        assert instance["epoch"] == epoch
        capacity = instance["capacity"]
        assert (capacity["num_blocks"], capacity["num_tokens"]) == (shown, 16 * shown)
        assert capacity["num_used_blocks"] == min(750, shown)


async def test_the_placement_names_workers_layers_heads_and_capacity(mesh: Mesh) -> None:
    load = WorkerLoad(num_blocks=1200, num_used_blocks=30, block_size=16)
    await mesh.decodes[0].report(load)
    await mesh.bus.publish(told(at_home(PREFILL), hosted=(hosted(whole_layers(20, 30)),)))
    await tell_placement(mesh, told(LAYERS_AWAY))
    decode, prefill = (await ask(mesh, "GET", "/v1/mesh/placement")).json()["instances"]
    assert (decode["name"], decode["epoch"], decode["num_layers"], decode["num_kv_heads"]) == (
        *("decode-0", 1),
        *(30, 3),
    )
    assert decode["layers"] == [
        {"first": 0, "end": 20, "worker": "decode-0", "incarnation": DECODE},
        {
            "first": 20, "end": 30, "worker": "prefill-0", "incarnation": PREFILL, "move_id": "m1",
            "has_weights_at_home": False,
        },
    ]  # fmt: skip
    capacity = decode["capacity"]
    assert (capacity["num_blocks"], capacity["num_used_blocks"], capacity["num_tokens"]) == (1200, 30, 19200)
    assert prefill["hosted"][0]["instance"] == "decode-0"
    assert prefill["hosted"][0]["what"] == "layers 20-29"
    assert prefill["capacity"]["num_hosted_bytes"] == 64 << 20


async def test_a_worker_that_left_is_in_no_placement_and_its_move_has_failed(mesh: Mesh) -> None:
    await mesh.bus.publish(MigrationUpdate(record=record()))
    await tell_placement(mesh, told(HEADS_AWAY))
    await mesh.decodes[0].die()
    async with mesh.http() as http:
        while (await http.get("/v1/mesh/placement")).json()["instances"]:
            pass
        (move,) = (await http.get("/v1/mesh")).json()["migrations"]
    assert (move["phase"], move["error"], move["is_over"]) == ("failed", "its home left the mesh", True)


async def test_a_move_of_a_home_that_is_not_here_is_never_seen_under_way(mesh: Mesh) -> None:
    await mesh.bus.publish(MigrationUpdate(record=record(move_id="m1", instance="gone")))
    await mesh.bus.publish(MigrationUpdate(record=done(move_id="m2", instance="gone")))
    await tell_placement(mesh, told(at_home()))
    async with mesh.http() as http:
        moves = (await http.get("/v1/mesh")).json()["migrations"]
    assert [(move["id"], move["phase"]) for move in moves] == [("m2", "done")]


async def test_rounds_are_explained_as_many_as_asked_for(mesh: Mesh, coordinator: Coordinator) -> None:
    coordinator.rounds = [seen(9, candidates=(candidate(),), move_id="m1"), seen(8)]
    asked = (await ask(mesh, "GET", "/v1/mesh/explain?rounds=7")).json()
    assert (asked["leader"], asked["is_automatic"]) == ("coordinator-0", True)
    assert [told["number"] for told in asked["rounds"]] == [9, 8]
    assert asked["rounds"][0]["candidates"][0]["verdict"] == "taken"
    await ask(mesh, "GET", "/v1/mesh/explain")
    assert coordinator.asked == [ExplainRounds(num_rounds=7), ExplainRounds(num_rounds=20)]


@pytest.mark.parametrize("rounds", ["0", "201", "-1", "x", "1.5", "", "٣", "9" * 5000])
async def test_a_number_of_rounds_that_is_none_is_400(mesh: Mesh, rounds: str) -> None:
    answer = await ask(mesh, "GET", f"/v1/mesh/explain?rounds={rounds}")
    assert (answer.status_code, error_of(answer)["param"]) == (400, "rounds")


async def test_the_snapshot_holds_placement_moves_and_the_last_round(
    mesh: Mesh, coordinator: Coordinator
) -> None:
    coordinator.rounds = [seen(4)]
    await tell_placement(mesh, told(HEADS_AWAY, moves=(record(MigrationPhase.DONE, move_id="h1"),)))
    async with mesh.http() as http:
        while (status := (await http.get("/v1/mesh")).json())["loop"] is None:
            pass
    assert status["placement"][0]["heads"][0]["kv_heads"] == [2]
    assert status["migrations"][0]["id"] == "h1"
    assert status["loop"]["rounds"][0]["number"] == 4


# Who may


async def mutations(mesh: Mesh, key: str | None) -> list[tuple[int, str | None]]:
    answers = [
        await ask(mesh, "POST", MIGRATIONS, LAYERS, key),
        await ask(mesh, "DELETE", MIGRATIONS + "/m1", None, key),
        await ask(mesh, "POST", "/v1/mesh/workers/decode-0/role", {"role": "both"}, key),
    ]
    return [(answer.status_code, answer.json().get("error", {}).get("code")) for answer in answers]


@with_settings(admin_key="", api_key=(API_KEY,))
async def test_without_an_admin_key_nobody_moves_anything_and_is_told_how_to_set_one(
    mesh: Mesh, owners: Owners
) -> None:
    for key in (None, "", API_KEY, "anything"):
        assert await mutations(mesh, key) == [(403, "no_admin_key")] * 3
    assert "KVMESH_ADMIN_KEY" in error_of(await start(mesh, **LAYERS))["message"]
    assert owners.asked == []


@with_settings(api_key=(API_KEY,))
async def test_api_keys_move_nothing_and_the_admin_key_reads_nothing(mesh: Mesh, owners: Owners) -> None:
    for key in (None, API_KEY, ADMIN_KEY + "x", ADMIN_KEY[:-1], "é"):
        assert await mutations(mesh, key) == [(401, "invalid_admin_key")] * 3
    assert owners.asked == []
    await owners.tell(record())
    async with mesh.http() as http:
        while not (await http.get("/v1/mesh", headers={"authorization": f"Bearer {API_KEY}"})).json()[
            "migrations"
        ]:
            pass
    for path in (MIGRATIONS, MIGRATIONS + "/m1", "/v1/mesh/placement", "/v1/mesh/explain"):
        assert (await ask(mesh, "GET", path, key=None)).status_code == 401
        assert (await ask(mesh, "GET", path, key=ADMIN_KEY)).status_code == 401
        assert (await ask(mesh, "GET", path, key=API_KEY)).status_code in (200, 503)
    assert [status for status, _ in await mutations(mesh, ADMIN_KEY)][1] == 202


async def test_the_admin_key_is_asked_for_before_the_body_is_read(mesh: Mesh) -> None:
    async with mesh.http() as http:
        answer = await http.post(MIGRATIONS, content=b"no json", headers={"content-type": "text/plain"})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await http.put(MIGRATIONS)).status_code == 405


@with_settings(admin_key="schlüssel 1")
async def test_an_admin_key_may_be_any_text(mesh: Mesh, owners: Owners) -> None:
    await tell_placement(mesh, told(at_home(), moves=(record(),)))
    assert (await ask(mesh, "DELETE", MIGRATIONS + "/m1", key="schlüssel 1")).status_code == 202
    assert len(owners.asked) == 1


def test_an_admin_key_that_is_an_api_key_is_no_setting() -> None:
    with pytest.raises(BadSetting, match="none of those in --api-key"):
        GatewaySettings(admin_key=API_KEY, api_key=(API_KEY,))
