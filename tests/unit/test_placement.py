import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.placement.migration import is_automatic, new_move_id
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import BadPlacement, LayerRun, PlacedModule, Placement, all_at_owner


def placed(move_id: str, module: Module, worker: str = "b") -> PlacedModule:
    return PlacedModule(move_id=move_id, module=module, worker=worker)


HOME = all_at_owner("a", num_layers=4, num_kv_heads=3)


def test_everything_at_home_is_one_run_of_all_layers() -> None:
    assert list(HOME.layer_runs()) == [LayerRun("a", 0, 4)]
    assert HOME.resident_slots() == tuple((layer, head) for layer in range(4) for head in range(3))


def test_layers_that_left_are_a_run_of_their_own_and_have_no_slots_at_home() -> None:
    moved = HOME.with_module(placed("m", whole_layers(1, 3)))
    assert list(moved.layer_runs()) == [LayerRun("a", 0, 1), LayerRun("b", 1, 3, "m"), LayerRun("a", 3, 4)]
    assert {layer for layer, _ in moved.resident_slots()} == {0, 3}
    assert moved.epoch == HOME.epoch + 1


def test_heads_that_left_leave_their_layers_at_home() -> None:
    moved = HOME.with_module(placed("m", heads_of(0, 2, (1,))))
    assert list(moved.layer_runs()) == [LayerRun("a", 0, 4)]
    assert moved.resident_slots()[:5] == ((0, 0), (0, 2), (1, 0), (1, 2), (2, 0))
    assert [one.move_id for one in moved.heads_away(1)] == ["m"]


def test_lent_blocks_change_no_slot() -> None:
    moved = HOME.with_module(placed("m", remote_blocks(4)))
    assert moved.resident_slots() == HOME.resident_slots()
    assert [one.move_id for one in moved.remote_blocks()] == ["m"]


def test_what_came_home_is_as_before_but_for_the_epoch() -> None:
    back = HOME.with_module(placed("m", whole_layers(1, 3))).without("m")
    assert (back.placed, back.epoch) == ((), 2)
    with pytest.raises(BadPlacement, match="no module that move m brought away"):
        back.without("m")


def test_all_modules_of_a_lost_worker_are_home_at_once() -> None:
    moved = HOME.with_module(placed("m", whole_layers(1, 2))).with_module(placed("n", heads_of(3, 4, (0,))))
    moved = moved.with_module(placed("o", whole_layers(2, 3), "c"))
    assert [one.move_id for one in moved.without_worker("b").placed] == ["o"]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (whole_layers(3, 5), "no run of the 4 layers"),
        (whole_layers(2, 2), "no run"),
        (heads_of(0, 1, ()), "none of 0 to 2"),
        (heads_of(0, 1, (3,)), "none of 0 to 2"),
        (heads_of(0, 1, (0, 1, 2)), "move whole layers"),
        (heads_of(1, 3, (0,)), "layer 1 is away already; first bring home what move m brought away"),
        (whole_layers(0, 2), "layer 1 is away already; first bring home what move m brought away"),
        (heads_of(2, 4, (0, 2)), "KV head 2 of layer 2 is away already; first bring home what move n"),
        (heads_of(2, 4, (0, 1)), "layer 2 would keep no KV head .* what move n brought away"),
    ],
)
def test_a_module_that_cannot_leave_is_refused_by_name(module: Module, words: str) -> None:
    away = HOME.with_module(placed("m", whole_layers(1, 2))).with_module(placed("n", heads_of(2, 4, (2,))))
    with pytest.raises(BadPlacement, match=words):
        away.with_module(placed("new", module))


def test_of_a_run_that_is_away_it_is_said_which_layers_left_together() -> None:
    away = HOME.with_module(placed("m", whole_layers(0, 3)))
    for module in (whole_layers(1, 2), heads_of(2, 4, (1,))):
        with pytest.raises(BadPlacement, match=r"layer [12], with layers 0 to 2, is away .* move m brought"):
            away.with_module(placed("new", module))


def test_all_moves_are_named_that_have_to_be_undone_first() -> None:
    away = HOME.with_module(placed("m", heads_of(0, 1, (0,)))).with_module(placed("n", heads_of(0, 1, (1,))))
    for module in (heads_of(0, 1, (2,)), remote_blocks(4)):
        with pytest.raises(BadPlacement, match="first bring home what moves m, n brought away"):
            away.with_module(placed("new", module))


def test_a_placement_travels() -> None:
    import msgspec

    moved = HOME.with_module(placed("m", heads_of(0, 2, (1,))))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(moved), type=Placement) == moved


def test_a_home_keeps_a_layer() -> None:
    with pytest.raises(BadPlacement, match="keeps at least one"):
        HOME.with_module(placed("m", whole_layers(0, 4)))
    moved = HOME.with_module(placed("m", whole_layers(0, 2)))
    with pytest.raises(BadPlacement, match=r"layers \[2, 4\] .* all 4 layers .* at least one; name fewer"):
        moved.with_module(placed("n", whole_layers(2, 4)))


def test_lent_blocks_stand_alone() -> None:
    lent = HOME.with_module(placed("m", remote_blocks(4)))
    for module in (remote_blocks(4), whole_layers(0, 1)):
        with pytest.raises(BadPlacement, match="home"):
            lent.with_module(placed("n", module, "c"))
    with pytest.raises(BadPlacement, match="do not mix"):
        HOME.with_module(placed("m", whole_layers(0, 1))).with_module(placed("n", remote_blocks(4)))


def test_lent_blocks_have_all_layers() -> None:
    with pytest.raises(BadPlacement, match="all 4 layers"):
        HOME.with_module(placed("m", remote_blocks(3)))


@given(st.lists(st.floats(1.6e9, 1.9e9), unique=True, min_size=2))
def test_names_of_moves_are_in_order_of_their_age(times):
    names = [new_move_id(at, "00", is_automatic=True) for at in sorted(times)]
    assert names == sorted(names)
    assert all(is_automatic(name) for name in names)
    assert not is_automatic(new_move_id(times[0], "00", is_automatic=False))
