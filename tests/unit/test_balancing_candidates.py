"""Which modules could move: always ones that the instance has, and that leave it something."""

from dataclasses import replace

from balancing_plant import MEMORY_BYTES, NUM_BLOCKS, SHAPE, device
from hypothesis import given
from hypothesis import strategies as st

from libs.balancing.candidates import head_groups, inbound, layer_runs, outbound, role_flips
from libs.balancing.decide import change_in_words
from libs.balancing.settings import BalancingSettings
from libs.balancing.view import (
    COMPUTE_WEIGHT,
    MEMORY_PRESSURE,
    MEMORY_WEIGHT,
    Device,
    Flip,
    Load,
    Outbound,
)
from libs.placement.module import ModuleKind, heads_of, module_in_words, remote_blocks, whole_layers
from libs.placement.placement import PlacedModule, Placement, all_at_owner, check_module
from libs.placement.role import Role

ALL = BalancingSettings()
WORKING, FULL, BOTH = (
    Load(*shares, occupancy=0.0) for shares in ((1.0, 0.1, 1.0), (0.1, 0.95, 0.0), (1.0, 0.95, 0.0))
)


def leaving(
    owner: Device, host: Device, load: Load, settings: BalancingSettings = ALL, *, gap: float
) -> list[Outbound]:
    return list(outbound(replace(owner, load=load), host, settings, gap=gap))


def away(module, worker="host", move_id="m") -> PlacedModule:
    return PlacedModule(move_id=move_id, module=module, worker=worker, num_blocks=10)


def spans(modules) -> list[tuple[int, int]]:
    return [(one.first_layer, one.end_layer) for one in modules]


def test_layer_runs_double_at_either_end_and_leave_one():
    assert spans(layer_runs(all_at_owner("h", 6, 2))) == [(0, 1), (5, 6), (0, 2), (4, 6), (0, 4), (2, 6)]
    assert layer_runs(all_at_owner("h", 1, 2)) == []


def test_layer_runs_begin_where_what_is_at_home_begins():
    placement = all_at_owner("h", 6, 2).with_module(away(whole_layers(0, 2)))
    assert spans(layer_runs(placement)) == [(2, 3), (5, 6), (2, 4), (4, 6)]


def test_layers_that_lack_a_head_do_not_move_as_a_whole():
    placement = all_at_owner("h", 6, 2).with_module(away(heads_of(0, 4, (1,))))
    assert spans(layer_runs(placement)) == [(4, 5), (5, 6), (4, 6)]


def test_head_groups_are_of_all_layers_or_the_later_half_and_leave_one_head():
    groups = head_groups(all_at_owner("h", 4, 3))
    assert {(one.first_layer, one.kv_heads) for one in groups} == {
        (0, (2,)), (0, (1, 2)), (2, (2,)), (2, (1, 2)),
    }  # fmt: skip
    assert head_groups(all_at_owner("h", 4, 1)) == []


def test_head_groups_that_keep_layers_whole_are_of_the_later_half_of_those():
    def starts(placement: Placement) -> set[tuple[int, int]]:
        return set(spans(head_groups(placement, keeps_layers=True)))

    assert starts(all_at_owner("h", 8, 3)) == {(4, 8)}
    assert starts(all_at_owner("h", 8, 3).with_module(away(heads_of(4, 8, (2,))))) == {(2, 4), (4, 8), (6, 8)}
    assert starts(all_at_owner("h", 1, 3)) == set()


def test_of_many_heads_not_every_count_is_a_candidate():
    counts = {len(one.kv_heads) for one in head_groups(all_at_owner("h", 4, 32))}
    assert counts == {1, 2, 3, 4, 5, 6, 7, 8, 16}


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """What candidates themselves have made of an instance."""
    placement = all_at_owner("h", draw(st.integers(1, 12)), draw(st.integers(1, 5)))
    for number in range(draw(st.integers(0, 4))):
        found = layer_runs(placement) + head_groups(placement)
        if found:
            placement = placement.with_module(away(draw(st.sampled_from(found)), move_id=str(number)))
    return placement


@given(placements(), st.floats(0, 1), st.sampled_from([WORKING, FULL, BOTH]))
def test_every_candidate_is_one_that_can_leave(placement: Placement, gap: float, load: Load):
    home = device("home", placement=placement)
    moves = leaving(home, device("host"), load, gap=gap)
    for move in moves:
        check_module(placement, move.module)
    assert len(moves) == len(set(moves))


def kinds(gap: float, load: Load, settings: BalancingSettings = ALL) -> set[tuple[str, bool]]:
    moves = leaving(device("a"), device("b"), load, settings, gap=gap)
    return {(one.module.kind.value, one.with_weights) for one in moves}


def test_layers_for_great_gaps_and_compute_heads_where_memory_alone_is_short():
    assert kinds(0.9, WORKING) == {("layers", False)}
    assert kinds(0.2, WORKING) == {("layers", False)}
    assert kinds(0.2, FULL) == {("heads", False)}
    assert kinds(0.9, FULL) == {("layers", False), ("layers", True), ("heads", False)}
    assert kinds(0.2, BOTH) == kinds(0.9, BOTH) == {("layers", False), ("layers", True)}


def test_no_heads_leave_a_pool_that_is_full_only_because_of_what_it_hosts():
    hosting = device("a", hosted_bytes=MEMORY_BYTES * 3 // 4, num_blocks=NUM_BLOCKS // 4)
    moves = leaving(hosting, device("b"), FULL, gap=0.2)
    assert {one.module.kind for one in moves} == {ModuleKind.LAYERS}
    little = device("a", hosted_bytes=MEMORY_BYTES // 10, num_blocks=NUM_BLOCKS * 9 // 10)
    moves = leaving(little, device("b"), FULL, gap=0.2)
    assert {one.module.kind for one in moves} == {ModuleKind.HEADS}


@given(placements())
def test_heads_that_leave_keep_no_instance_from_giving_layers_later(placement: Placement):
    home = device("home", placement=placement)
    could = layer_runs(placement)
    for move in leaving(home, device("host"), FULL, gap=0.2):
        if move.module.kind is ModuleKind.HEADS:
            after = layer_runs(placement.with_module(away(move.module, move_id="new")))
            assert after or not could


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9), st.floats(0, 1))
def test_heads_leave_only_where_own_sequences_fill_more_than_the_pressure(
    compute, memory, queue, tenths, gap
):
    home = device("a", hosted_bytes=MEMORY_BYTES * tenths // 10, num_blocks=NUM_BLOCKS * (10 - tenths) // 10)
    moves = leaving(home, device("b"), Load(compute, memory, queue, 0.0), gap=gap)
    if any(one.module.kind is ModuleKind.HEADS for one in moves):
        assert memory * home.num_blocks >= MEMORY_PRESSURE * (NUM_BLOCKS - 1)
        assert MEMORY_WEIGHT * memory > COMPUTE_WEIGHT * compute


def test_no_heads_go_to_a_worker_whose_own_modules_are_here():
    guest = device("b", placement=all_at_owner("b", 30, 3).with_module(away(whole_layers(0, 2), "a")))
    assert not leaving(device("a"), guest, FULL, gap=0.2)
    elsewhere = device("b", placement=all_at_owner("b", 30, 3).with_module(away(whole_layers(0, 2), "c")))
    assert leaving(device("a"), elsewhere, FULL, gap=0.2)


def test_a_home_whose_memory_is_not_short_gets_no_more_blocks_than_it_has():
    def wanted(load: Load) -> set[int]:
        return {one.num_blocks for one in leaving(device("a"), device("b"), load, gap=0.2)}

    assert wanted(WORKING) == {device("a").num_blocks}
    assert wanted(BOTH) == {device("a").num_blocks * 3 // 2}
    assert wanted(FULL) == {0}, "as many as there can be"


def test_each_kind_can_be_switched_off():
    assert kinds(0.9, FULL, BalancingSettings(moves_layers=False)) == {("heads", False)}
    assert kinds(0.9, FULL, BalancingSettings(moves_heads=False)) == {("layers", False), ("layers", True)}


def test_a_model_with_one_kv_head_lends_blocks_where_memory_is_short():
    home = device("home", placement=all_at_owner("home", 30, 1))
    moves = leaving(home, device("host"), FULL, gap=0.2)
    assert [one.module.kind for one in moves] == [ModuleKind.TOKENS]
    lent = home.placement.with_module(away(remote_blocks(30)))
    there = device("home", placement=lent)
    assert not leaving(there, device("host"), FULL, gap=0.9)


def test_only_what_may_be_given_back_comes_home_and_from_its_host():
    placement = all_at_owner("home", 30, 3).with_module(away(whole_layers(0, 2), move_id="mine"))
    placement = placement.with_module(away(whole_layers(2, 4), move_id="manual"))
    home = device("home", placement=placement)
    found = list(inbound(home, device("host"), frozenset({"mine"})))
    assert [(one.move_id, one.host) for one in found] == [("mine", "host")]
    assert not list(inbound(home, device("other"), frozenset({"mine"})))


def test_only_workers_that_host_nothing_and_have_everything_flip_and_never_the_last():
    busy = device("d0", placement=all_at_owner("d0", 30, 3).with_module(away(whole_layers(0, 2), "p1")))
    view = (device("p0", Role.PREFILL), device("p1", Role.PREFILL), busy)
    assert list(role_flips(view)) == [Flip("p0", Role.DECODE)]
    hosting = device("d1", hosted_bytes=5)
    view = (device("p0", Role.PREFILL), device("d0"), hosting)
    assert list(role_flips(view)) == [Flip("d0", Role.PREFILL)]


def test_moves_in_words():
    assert module_in_words(whole_layers(20, 30)) == "layers 20-29"
    assert module_in_words(whole_layers(3, 4)) == "layer 3"
    assert module_in_words(heads_of(0, 30, (1, 2))) == "KV heads 1, 2 of layers 0-29"
    assert module_in_words(remote_blocks(SHAPE.num_layers)) == "lent blocks"
    assert change_in_words(Flip("w", Role.DECODE)) == "flip to decode"
