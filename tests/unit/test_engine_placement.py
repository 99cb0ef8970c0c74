import pytest

from libs.engine.errors import BadPlacement
from libs.engine.placement import LayerRun, Placement, all_home, check_placement


def test_everything_at_home_is_one_run_of_all_layers() -> None:
    placement = all_home("a", num_layers=3, num_kv_heads=2)
    assert list(placement.layer_runs()) == [LayerRun("a", 0, 3)]
    assert placement.resident_slots("a") == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    check_placement(placement, num_layers=3, num_kv_heads=2)


def test_consecutive_layers_of_one_worker_are_one_run() -> None:
    placement = Placement("a", 1, ("a", "b", "b", "a"), (("a",),) * 4)
    assert list(placement.layer_runs()) == [LayerRun("a", 0, 1), LayerRun("b", 1, 3), LayerRun("a", 3, 4)]
    assert [layer for run in placement.layer_runs() for layer in run.layers] == [0, 1, 2, 3]


def test_heads_that_left_have_no_slot_here() -> None:
    placement = Placement("a", 1, ("a", "a"), (("a", "b"), ("b", "a")))
    assert placement.resident_slots("a") == ((0, 0), (1, 1))
    assert placement.resident_slots("b") == ((0, 1), (1, 0))


def test_a_module_on_another_worker_is_refused_by_name() -> None:
    with pytest.raises(BadPlacement, match="modules on b"):
        check_placement(Placement("a", 3, ("a", "b"), (("a",), ("a",))), num_layers=2, num_kv_heads=1)
    with pytest.raises(BadPlacement, match="modules on c"):
        check_placement(Placement("a", 3, ("a", "a"), (("a",), ("c",))), num_layers=2, num_kv_heads=1)


@pytest.mark.parametrize(
    ("runs_layer", "holds_head"),
    [
        (("a",), (("a",), ("a",))),
        (("a", "a"), (("a",),)),
        (("a", "a"), (("a",), ("a", "a"))),
        (("a", "a"), (("a", "a"), ("a", "a"))),
    ],
)
def test_a_placement_of_another_shape_than_the_model_is_refused(
    runs_layer: tuple[str, ...], holds_head: tuple[tuple[str, ...], ...]
) -> None:
    with pytest.raises(BadPlacement, match="the model has 2 layers with 1"):
        check_placement(Placement("a", 0, runs_layer, holds_head), num_layers=2, num_kv_heads=1)
