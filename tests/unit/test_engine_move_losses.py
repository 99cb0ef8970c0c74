"""A host is lost, at any call: what can be computed again is, what cannot is told, nothing is told twice."""

import pytest
import torch
from engine_moves import (
    SIZE,
    Mesh,
    Told,
    begin,
    check_baseline,
    core_of,
    drain,
    generation,
    model_of,
    prompt_of,
)

from libs.engine.errors import MoveRefused
from libs.engine.hosting.port import HostLost
from libs.engine.outputs import LayerOutput
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import Placement

MODULES = {
    "layers": whole_layers(1, 3),
    "last layers": whole_layers(3, 4),
    "heads": heads_of(0, 4, (1, 2)),
    "lent blocks": remote_blocks(4),
}
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
PROMPT = prompt_of(61)


def unmoved(*asked: int) -> dict[str, list[int]]:
    core = core_of(model_of("gqa"))
    for one in asked:
        begin(core, generation(prompt_of(20 + one, one), f"s{one}"))
    return drain(core).tokens


@each_module
@pytest.mark.parametrize("num_calls", [0, 1, 2, 5, 11])
def test_sequences_that_decode_go_on_with_the_same_tokens(module: Module, num_calls: int) -> None:
    heard: list[tuple[Placement, str]] = []
    core = core_of(
        model_of("gqa"), num_blocks=34, on_placement=lambda placement, lost: heard.append((placement, lost))
    )
    mesh = Mesh(core)
    mesh.away(module, "m", lent=40)
    for one in range(6):
        begin(core, generation(prompt_of(20 + one, one), f"s{one}"))

    def between(number: int) -> None:
        if number == 5:
            mesh.fuses["host"] = num_calls

    told = drain(core, between)
    assert told.failed == {}
    assert told.tokens == unmoved(*range(6))
    assert heard[-1][0].placed == ()
    assert heard[-1][0].epoch == 2
    assert heard[-1][1].startswith("host: ")
    assert core.load().num_blocks == 34
    check_baseline(core)


@each_module
def test_a_prompt_that_is_handed_over_leaves_once_or_fails(module: Module) -> None:
    outcomes = set[str]()
    for num_calls in range(0, 40, 3):
        heard: list[LayerOutput] = []
        core = core_of(model_of("gqa"), num_blocks=34, max_num_batched_tokens=24, on_layers=heard.extend)
        mesh = Mesh(core)
        mesh.away(module, "m", lent=40)
        if module.kind is remote_blocks(4).kind:
            assert core.sequences.reserve(
                generation(prompt_of(28 * SIZE), "holds"), "holds", whole_prompt=True
            )
        begin(core, generation(PROMPT, "out"), hand_over=True)
        mesh.fuses["host"] = num_calls
        told = drain(core)
        places = [(one.layer, one.first_block) for one in heard]
        assert len(places) == len(set(places))
        if told.failed:
            assert told.failed == {"out": "peer_lost"}
            assert not told.tokens
        else:
            assert sum(len(one.blocks) for one in heard) == 4 * 8
        outcomes.add("failed" if told.failed else "done")
    assert outcomes == {"failed", "done"}


@each_module
def test_only_sequences_that_await_kv_fail(module: Module) -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=60))
    core = mesh.home
    begin(core, generation(PROMPT, "first"))
    drain(core)
    mesh.away(module, "m", lent=40)
    kv = torch.zeros((2, 3, 2, SIZE, 16))
    for name, kind in (("untouched", 1), ("written", 2), ("loading", 3)):
        assert (
            core.sequences.reserve(generation(prompt_of(40, kind), name), name, whole_prompt=True) is not None
        )
    found = core.sequences.reserve(generation(PROMPT, "found"), "found", whole_prompt=True)
    assert found is not None
    assert found.num_cached_blocks == 7
    core.incoming.write("written", 0, 0, kv)
    core.sequences.begin("loading", num_computed_tokens=32, awaits_kv=True)
    core.migrator.lose_host("host", "gone")
    told = Told()
    told.add(core.step())
    assert told.failed == dict.fromkeys(("written", "loading", "found"), "peer_lost")
    assert core.sequences.allocator.names() == []
    core.sequences.begin("untouched", num_computed_tokens=0)
    plain = core_of(model_of("gqa"))
    begin(plain, generation(prompt_of(40, 1), "untouched"))
    assert drain(core).tokens == drain(plain).tokens
    check_baseline(core)


def test_weights_that_had_travelled_are_read_again() -> None:
    mesh = Mesh(core_of(model_of("qk_norm"), num_blocks=60))
    expected = Mesh(core_of(model_of("qk_norm"), num_blocks=60))
    for core in (mesh.home, expected.home):
        begin(core, generation(PROMPT, "x"))
    mesh.away(whole_layers(0, 3), "m", with_weights=True)
    assert mesh.home.load().num_blocks > 60 * 4
    told = Told()
    told.add(mesh.home.step())
    mesh.home.migrator.lose_host("host", "gone")
    assert list(mesh.home.model.weights.layers) == [0, 1, 2, 3]
    assert mesh.home.load().num_blocks == 60
    assert drain(mesh.home, told=told).tokens == drain(expected.home).tokens


def test_modules_at_other_hosts_stay_where_they_are() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    for one in range(6):
        begin(mesh.home, generation(prompt_of(20 + one, one), f"s{one}"))
    mesh.away(whole_layers(0, 1), "a", "a")
    mesh.away(heads_of(2, 4, (0,)), "b", "b")

    def between(number: int) -> None:
        if number == 6:
            mesh.home.migrator.lose_host("a", "gone")
            assert [one.move_id for one in mesh.home.placement.placed] == ["b"]

    assert drain(mesh.home, between).tokens == unmoved(*range(6))


def test_a_move_whose_host_is_lost_is_over_and_costs_nothing() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    for one in range(6):
        begin(mesh.home, generation(prompt_of(20 + one, one), f"s{one}"))
    mesh.home.step()
    mesh.begin(whole_layers(0, 1), "m")
    mesh.fuses["host"] = 0
    with pytest.raises(HostLost):
        mesh.switch("m")
    with pytest.raises(MoveRefused, match=r"^its host was lost: "):
        mesh.switch("m")
    with pytest.raises(MoveRefused, match="not under way"):
        mesh.switch("another")
    assert mesh.home.placement.epoch == 0
    preempted = [one for one in mesh.home.sequences.by_age if not one.blocks]
    assert preempted == []
    told = drain(mesh.home)
    assert {name: ids[-20:] for name, ids in told.tokens.items()} == {
        name: ids[-20:] for name, ids in unmoved(*range(6)).items()
    }


def test_who_wants_back_what_went_with_a_lost_host_hears_why_it_is_home() -> None:
    mesh = Mesh(core_of(model_of("gqa")))
    mesh.away(whole_layers(0, 1), "m")
    mesh.home.migrator.lose_host("host", "it left the mesh")
    with pytest.raises(MoveRefused, match=r"^its host was lost: it left the mesh$"):
        mesh.begin_return("m")


def test_a_home_that_hosts_others_has_room_for_everything_that_comes_home() -> None:
    mesh = Mesh(core_of(model_of("gqa"), num_blocks=120))
    mesh.away(heads_of(0, 4, (0, 1)), "m")
    granted = mesh.home.hosted.open(
        "guest", "theirs", heads_of(0, 4, (0,)), num_blocks_wanted=4000, num_blocks_least=1
    )
    assert granted > 0
    begin(mesh.home, generation(PROMPT, "x", max_tokens=150))
    for _ in range(4):
        mesh.home.step()
    mesh.home.migrator.lose_host("host", "gone")
    assert mesh.home.load().num_blocks >= 256 // SIZE
    told = drain(mesh.home)
    assert told.failed == {}
    mesh.home.hosted.close("guest", "theirs")
    assert mesh.home.load().num_blocks == 120
