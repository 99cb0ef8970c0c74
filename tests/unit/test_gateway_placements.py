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
    done,
    hosted,
    placed,
    record,
    told,
)
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from libs.bus.messages.migration import MoveRecord
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.placement.module import heads_of, lent_blocks, module_in_words, whole_layers
from libs.placement.phases import MovePhase, is_over
from libs.placement.placement import BadPlacement, Placement, all_home
from services.gateway.api.admin import AdminKey, is_admin_call
from services.gateway.api.errors import BadRequest, Forbidden, Unauthorized
from services.gateway.mesh.migration_fields import MigrationRequest, check_shape, plan_of
from services.gateway.mesh.placement_view import move_document, placement_document
from services.gateway.mesh.placements import MAX_MOVES, Placements
from services.gateway.mesh.view import Loads


def test_what_is_told_again_is_no_news_and_a_change_is() -> None:
    placements = Placements()
    first = told(at_home(), hosted=(hosted(whole_layers(0, 1), PREFILL),), moves=(record(),))
    assert placements.hear(first, 1.0)
    assert not placements.hear(first, 2.0)
    assert placements.hear(told(at_home(), moves=(record(),)), 3.0)
    assert placements.hear(told(HEADS_AWAY), 4.0)
    assert placements.hear(told(HEADS_AWAY, moves=(done(),)), 5.0)
    assert placements.hear(told(HEADS_AWAY, num_blocks=9), 5.0), "guests came and took blocks"
    heard = placements.get(DECODE)
    assert heard is not None
    assert (heard.told.placement.epoch, heard.heard) == (1, 5.0)


COURSES = [
    [MovePhase.PLANNED, MovePhase.RESERVING, MovePhase.COPYING, MovePhase.CATCHING_UP, MovePhase.SWITCHING,
     MovePhase.RELEASING, MovePhase.DONE],
    [MovePhase.PLANNED, MovePhase.RESERVING, MovePhase.COPYING, MovePhase.ROLLING_BACK, MovePhase.FAILED],
]  # fmt: skip


@given(st.sampled_from(COURSES), st.data())
def test_in_whatever_order_a_moves_phases_come_the_last_one_stays(
    course: list[MovePhase], data: st.DataObject
) -> None:
    placements = Placements()
    for phase in data.draw(st.permutations(course)):
        placements.hear_move(record(phase))
    assert [move.phase for move in placements.moves()] == course[-1:]


def test_a_home_that_was_thought_to_be_gone_has_the_last_word_on_how_its_move_ended() -> None:
    placements = Placements()
    placements.hear_move(record())
    placements.forget(DECODE, 1002.0)
    assert [move.error for move in placements.moves()] == ["its home left the mesh"]
    assert not placements.hear_move(record(MovePhase.SWITCHING))  # late
    assert placements.hear_move(done())
    assert not placements.hear_move(record(MovePhase.RELEASING))
    assert [move.phase for move in placements.moves()] == [MovePhase.DONE]


def test_figures_within_a_phase_are_news() -> None:
    placements = Placements()
    assert placements.hear_move(record(num_kv_bytes=1))
    assert placements.hear_move(record(num_kv_bytes=2))
    assert not placements.hear_move(record(num_kv_bytes=2))


@given(st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=200))
def test_moves_are_bounded_and_none_under_way_is_forgotten(told_moves: list[tuple[int, bool]]) -> None:
    placements = Placements()
    under_way: set[str] = set()
    for number, ends in told_moves:
        name = f"m{number}"
        phase = MovePhase.DONE if ends else MovePhase.COPYING
        facts: dict[str, Any] = {"started_unix_seconds": float(number), "ended_unix_seconds": float(number)}
        known = {move.move_id: move for move in placements.moves()}
        placements.hear_move(record(phase, name, **facts))
        if not ends and (name not in known or not is_over(known[name].phase)):
            under_way.add(name)
        elif ends:
            under_way.discard(name)
    moves = placements.moves()
    assert under_way <= {move.move_id for move in moves}
    assert len(moves) <= max(MAX_MOVES, len(under_way))
    starts = [move.started_unix_seconds for move in moves]
    assert starts == sorted(starts, reverse=True)


def test_the_latest_moves_are_the_newest_and_all_under_way() -> None:
    placements = Placements()
    placements.hear_move(record(move_id="old", started_unix_seconds=1.0))
    for number in range(5):
        placements.hear_move(done(move_id=f"m{number}", started_unix_seconds=10.0 + number))
    assert [move.move_id for move in placements.latest(2)] == ["m4", "m3", "old"]
    assert len(placements.latest(50)) == 6


def test_a_home_that_left_moves_nothing_any_more() -> None:
    placements = Placements()
    other = record(move_id="m2", instance=PREFILL, host=DECODE)
    for move in (record(), other, done(move_id="m0")):
        placements.hear_move(move)
    placements.forget(DECODE, 2000.0)
    phases = {move.move_id: (move.phase, move.ended_unix_seconds) for move in placements.moves()}
    assert phases == {
        "m1": (MovePhase.FAILED, 2000.0),
        "m2": (MovePhase.COPYING, 0.0),
        "m0": (MovePhase.DONE, 1001.5),
    }


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (whole_layers(20, 30), "layers 20-29"),
        (whole_layers(7, 8), "layer 7"),
        (heads_of(0, 30, (1,)), "KV head 1 of layers 0-29"),
        (heads_of(3, 4, (0, 2)), "KV heads 0, 2 of layer 3"),
        (lent_blocks(30), "lent blocks"),
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
        ({"module": lent_blocks(30)}, "tokens"),
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


def modules() -> st.SearchStrategy[Any]:
    runs = st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(1, NUM_LAYERS)).map(sorted)
    layers = runs.filter(lambda run: run[0] < run[1]).map(lambda run: whole_layers(*run))
    heads = st.tuples(runs.filter(lambda run: run[0] < run[1]), st.sets(st.integers(0, NUM_HEADS - 1)))
    return layers | heads.map(lambda both: heads_of(*both[0], tuple(both[1])))


def placement_of(parts: list[Any]) -> Placement:
    placement = all_home(DECODE, NUM_LAYERS, NUM_HEADS)
    for number, module in enumerate(parts):
        try:
            placement = placement.with_module(placed(module, f"w{number % 3}", f"m{number}"))
        except BadPlacement:
            continue
    return placement


@given(st.lists(modules(), max_size=8))
def test_the_document_tells_the_holder_of_every_layer_and_head(parts: list[Any]) -> None:
    placement = placement_of(parts)
    placements = Placements()
    placements.hear(told(placement), 1.0)
    (instance,) = placement_document([presence()], placements, Loads(), 2.5)
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
        (at_home().with_module(placed(lent_blocks(NUM_LAYERS), num_blocks=5)), 15, 10 * 900),
    ],
    ids=["all at home", "a third of the layers away", "one of three heads away", "five blocks lent"],
)
def test_own_bytes_are_those_of_what_lies_at_home_and_guests_count_apart(
    placement: Placement, num_blocks: int, num_own_bytes: int
) -> None:
    placements = Placements()
    guest = hosted(whole_layers(0, 1), PREFILL)
    placements.hear(told(placement, num_blocks=num_blocks, hosted=(guest, guest)), 0.0)
    worker = msgspec.structs.replace(presence(), block_bytes=900)
    (instance,) = placement_document([worker], placements, Loads(), 0.0)
    capacity = instance["capacity"]
    assert (capacity["num_own_bytes"], capacity["num_hosted_bytes"]) == (num_own_bytes, 2 * guest.num_bytes)


def test_lent_blocks_and_a_load_that_is_not_told_yet() -> None:
    placements = Placements()
    placements.hear(told(at_home().with_module(placed(lent_blocks(NUM_LAYERS), num_blocks=70))), 0.0)
    (instance,) = placement_document([presence()], placements, Loads(), 0.0)
    assert [(one["worker"], one["num_blocks"]) for one in instance["lent"]] == [(PREFILL, 70)]
    assert instance["capacity"]["num_blocks"] == 0
    assert instance["capacity"]["kv_memory_bytes"] == 1 << 30


def test_who_told_nothing_is_in_no_document() -> None:
    placements = Placements()
    placements.hear(told(LAYERS_AWAY), 0.0)
    others = [presence("decode-1", "x"), presence()]
    assert [one["name"] for one in placement_document(others, placements, Loads(), 0.0)] == ["decode-0"]


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
    plan = plan_of(asked, instance="a-i", host="b-i" if asked.host else "", num_layers=30)
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


def test_records_are_kept_as_they_were_told() -> None:
    placements = Placements()
    placements.hear_move(done())
    (move,) = placements.moves()
    assert isinstance(move, MoveRecord)
    assert move == done()
