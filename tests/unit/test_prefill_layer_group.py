import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.outputs import LayerOutput
from libs.kv.layer_groups import FRAME_BYTES, layer_groups, layers_per_frame
from libs.worker.prefill.layer_group import LayerGroup


def output(layer: int, first_block: int = 0, num_blocks: int = 2, head_dim: int = 8) -> LayerOutput:
    return LayerOutput("r", layer, first_block, torch.full((num_blocks, 1, 2, 4, head_dim), float(layer)))


@given(st.integers(1, 80), st.integers(1, 1 << 24))
def test_groups_cover_all_layers_in_order_and_none_is_larger_than_a_frame_unless_it_is_one_layer(
    num_layers: int, layer_bytes: int
) -> None:
    groups = layer_groups(num_layers, layer_bytes)
    assert [layer for group in groups for layer in group] == list(range(num_layers))
    assert all(len(group) == 1 or len(group) * layer_bytes <= FRAME_BYTES for group in groups)
    assert len(groups[0]) == layers_per_frame(num_layers, layer_bytes)


def test_small_layers_wait_for_each_other_up_to_the_last_one() -> None:
    group = LayerGroup(output(0), num_layers=3)
    assert not group.is_full
    for layer in (1, 2):
        assert group.takes(output(layer))
        group.outputs.append(output(layer))
    assert group.is_full
    assert group.joined()[:, 0, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_large_layer_goes_alone_and_uncopied() -> None:
    large = output(0, num_blocks=FRAME_BYTES // (2 * 4 * 64 * 4), head_dim=64)
    group = LayerGroup(large, num_layers=3)
    assert group.is_full
    assert group.joined().data_ptr() == large.blocks.data_ptr()


def test_another_chunk_or_a_gap_in_the_layers_does_not_join() -> None:
    group = LayerGroup(output(0), num_layers=9)
    assert not group.takes(output(2))
    assert not group.takes(output(1, first_block=2))
    assert not group.takes(output(1, num_blocks=3))
