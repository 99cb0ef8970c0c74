"""What a gateway keeps of placements and moves, and how it tells them: pure."""

from typing import Any

import msgspec
import pytest
from gateway_coordinator import (
    DECODE,
    HEADS_AWAY,
    LAYERS_AWAY,
    NUM_HEADS,
    NUM_LAYERS,
    PREFILL,
    at_home,
    hosted,
    placed,
    record,
    told,
)
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from libs.bus.messages.migration import PlacementUpdate
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.mesh.cluster_state import ClusterState
from libs.placement.module import heads_of, module_in_words, remote_blocks, whole_layers
from libs.placement.placement import BadPlacement, Placement, all_at_owner
from libs.runtime.roster import Roster
from services.gateway.api.auth import AdminKey, is_admin_call
from services.gateway.api.errors import BadRequest, Forbidden, Unauthorized
from services.gateway.mesh.migration_fields import MigrationRequest, check_shape, order_of
from services.gateway.mesh.placement_view import move_document, placement_document


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (whole_layers(20, 30), "layers 20-29"),
        (whole_layers(7, 8), "layer 7"),
        (heads_of(0, 30, (1,)), "KV head 1 of layers 0-29"),
        (heads_of(3, 4, (0, 2)), "KV heads 0, 2 of layer 3"),
        (remote_blocks(30), "lent blocks"),
    ],
)
def test_modules_have_words(module: Any, words: str) -> None:
    assert module_in_words(module) == words


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, "offload"),
        ({"with_weights": True}, "migrate"),
        ({"module": heads_of(0, 1, (0,))}, "heads"),
        ({"module": remote_blocks(30)}, "tokens"),
        ({"is_return": True, "with_weights": True}, "return"),
    ],
)
def test_a_move_tells_its_kind_and_the_names_that_are_known(facts: dict[str, Any], kind: str) -> None:
    told_move = move_document(record(**facts), {DECODE: "decode-0"})
    assert (told_move["kind"], told_move["instance_name"], told_move["host_name"]) == (kind, "decode-0", "")
    assert told_move["id"] == "m1"
    assert move_document(record(instance_name="was"), {DECODE: "is"})["instance_name"] == "was"


def test_blocks_that_are_not_known_are_null() -> None:
    moving = move_document(record(num_blocks_before=800), {})
    assert (moving["num_blocks_before"], moving["num_blocks_after"]) == (800, None)


def presence(name: str = "decode-0", incarnation: str = DECODE) -> Presence:
    return Presence(
        kind=ServiceKind.DECODE_WORKER,
        name=name,
        incarnation=incarnation,
        state=ServiceState.READY,
        kv_memory_bytes=1 << 30,
    )


def cluster_of(
    *updates: PlacementUpdate, workers: tuple[Presence, ...] = (), now: float = 0.0
) -> ClusterState:
    roster = Roster()
    for worker in workers or (presence(),):
        roster.seen(worker, 0.0)
    cluster = ClusterState(roster)
    for update in updates:
        cluster.hear_placement(update, now)
    return cluster


def modules() -> st.SearchStrategy[Any]:
    runs = st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(1, NUM_LAYERS)).map(sorted)
    layers = runs.filter(lambda run: run[0] < run[1]).map(lambda run: whole_layers(*run))
    heads = st.tuples(runs.filter(lambda run: run[0] < run[1]), st.sets(st.integers(0, NUM_HEADS - 1)))
    return layers | heads.map(lambda both: heads_of(*both[0], tuple(both[1])))


def placement_of(parts: list[Any]) -> Placement:
    placement = all_at_owner(DECODE, NUM_LAYERS, NUM_HEADS)
    for number, module in enumerate(parts):
        try:
            placement = placement.with_module(placed(module, f"w{number % 3}", f"m{number}"))
        except BadPlacement:
            continue
    return placement


@given(st.lists(modules(), max_size=8))
def test_the_document_tells_the_holder_of_every_layer_and_head(parts: list[Any]) -> None:
    placement = placement_of(parts)
    (instance,) = placement_document(cluster_of(told(placement), now=1.0), 2.5)
    assert (instance["age_seconds"], instance["epoch"]) == (1.5, placement.epoch)
    assert [layer for run in instance["layers"] for layer in range(run["first"], run["end"])] == list(
        range(NUM_LAYERS)
    )
    at_decode = {
        (layer, head)
        for run in instance["layers"]
        for layer in range(run["first"], run["end"])
        for head in range(NUM_HEADS)
        if run["worker"] == "decode-0"
    }
    for part in instance["heads"]:
        at_decode -= {(layer, h) for layer in range(part["first"], part["end"]) for h in part["kv_heads"]}
    assert at_decode == set(placement.resident_slots())


@pytest.mark.parametrize(
    ("placement", "num_blocks", "num_own_bytes"),
    [
        (at_home(), 10, 10 * 900),
        (LAYERS_AWAY, 15, 15 * 600),
        (HEADS_AWAY, 15, 15 * 600),
        (at_home().with_module(placed(remote_blocks(NUM_LAYERS), num_blocks=5)), 15, 10 * 900),
    ],
    ids=["all at home", "a third of the layers away", "one of three heads away", "five blocks lent"],
)
def test_own_bytes_are_those_of_what_lies_at_home_and_guests_count_apart(
    placement: Placement, num_blocks: int, num_own_bytes: int
) -> None:
    guest = hosted(whole_layers(0, 1), PREFILL)
    update = told(placement, num_blocks=num_blocks, hosted=(guest, guest))
    worker = msgspec.structs.replace(presence(), block_bytes=900)
    (instance,) = placement_document(cluster_of(update, workers=(worker,)), 0.0)
    capacity = instance["capacity"]
    assert (capacity["num_own_bytes"], capacity["num_hosted_bytes"]) == (num_own_bytes, 2 * guest.num_bytes)


def test_lent_blocks_and_a_load_that_is_not_told_yet() -> None:
    update = told(at_home().with_module(placed(remote_blocks(NUM_LAYERS), num_blocks=70)))
    (instance,) = placement_document(cluster_of(update), 0.0)
    assert [(one["worker"], one["num_blocks"]) for one in instance["lent"]] == [(PREFILL, 70)]
    assert instance["capacity"]["num_blocks"] == 0
    assert instance["capacity"]["kv_memory_bytes"] == 1 << 30


def test_who_told_nothing_is_in_no_document() -> None:
    cluster = cluster_of(told(LAYERS_AWAY), workers=(presence("decode-1", "x"), presence()))
    assert [one["name"] for one in placement_document(cluster, 0.0)] == ["decode-0"]


@given(
    st.builds(
        MigrationRequest,
        instance=st.just("a"),
        host=st.none() | st.just("b"),
        layers=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)),
        kv_heads=st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
        tokens=st.booleans(),
        num_blocks=st.none() | st.integers(1, 9),
        return_of=st.none() | st.just("m"),
        kind=st.none() | st.sampled_from(["migrate", "offload"]),
    )
)
def test_what_passes_the_check_is_one_whole_move(asked: MigrationRequest) -> None:
    try:
        check_shape(asked)
    except BadRequest:
        return
    host = "b-i" if asked.host else ""
    plan = order_of(asked, at_home(), move_id="m1", host=host, deadline_seconds=9.0)
    assert (plan.module is None) == bool(plan.returned_move_id)
    assert bool(plan.host) == (plan.module is not None)
    if plan.module is not None:
        assert plan.module.first_layer < plan.module.end_layer
        assert len(set(plan.module.kv_heads)) == len(plan.module.kv_heads)
    is_layers = asked.layers is not None and asked.kv_heads is None
    assert plan.with_weights == (is_layers and asked.kind != "offload")
    assert not plan.num_blocks or plan.module is not None


@pytest.mark.parametrize(
    ("method", "path", "is_admin"),
    [
        ("POST", "/v1/mesh/migrations", True),
        ("DELETE", "/v1/mesh/migrations/m1", True),
        ("POST", "/v1/mesh/migrations/", True),
        ("GET", "/v1/mesh/migrations", False),
        ("GET", "/v1/mesh/migrations/m1", False),
        ("POST", "/v1/mesh/migrationsx", False),
        ("POST", "/v1/chat/completions", False),
    ],
)
def test_which_calls_are_the_admins(method: str, path: str, is_admin: bool) -> None:
    assert is_admin_call(method, path) is is_admin


def request(header: str | None) -> Request:
    headers = [] if header is None else [(b"authorization", header.encode())]
    return Request({"type": "http", "headers": headers})


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer k", "Basic key", "key", "Bearer key2"]
)
def test_only_the_whole_key_as_bearer_passes(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        AdminKey("key").check(request(header))
    AdminKey("key").check(request("bearer key"))
    AdminKey("key").check(request("Bearer  key "))


@pytest.mark.parametrize("header", [None, "Bearer ", "Bearer x"])
def test_where_no_key_is_set_none_passes_not_even_an_empty_one(header: str | None) -> None:
    with pytest.raises(Forbidden, match="KVMESH_ADMIN_KEY"):
        AdminKey("").check(request(header))
