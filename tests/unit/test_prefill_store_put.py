import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.outputs import LayerOutput
from services.prefill_worker.store_put import StorePut

NUM_LAYERS = 2


def output(layer: int, first_block: int, end: int) -> LayerOutput:
    """Blocks whose content tells layer and index."""
    values = torch.arange(first_block, end, dtype=torch.float32) + 100 * layer
    return LayerOutput(
        "r", layer, first_block, values.view(-1, 1, 1, 1, 1).expand(-1, 1, 2, 2, 2).contiguous()
    )


@given(st.data())
def test_it_keeps_its_blocks_and_no_others_however_the_prompt_was_cut(data: st.DataObject) -> None:
    num_full = data.draw(st.integers(1, 20))
    first = data.draw(st.integers(0, num_full - 1))
    has_partial = data.draw(st.booleans())
    put = StorePut([bytes([n]) * 16 for n in range(first, num_full)], first, NUM_LAYERS)
    end = num_full + has_partial
    cuts = sorted(data.draw(st.sets(st.integers(0, end), max_size=5)) | {end})
    handed = data.draw(st.integers(0, first))  # a hand-over may begin behind what the decode worker has
    for cut in cuts:
        if cut <= handed:
            continue
        assert put.is_complete == (handed >= num_full)
        for layer in range(NUM_LAYERS):
            put.collect(output(layer, handed, cut))
        handed = cut
    assert put.is_complete
    for layer in range(NUM_LAYERS):
        blocks = put.take_layers(range(layer, layer + 1))
        assert blocks.is_contiguous()
        assert blocks[:, 0, 0, 0, 0].tolist() == [100 * layer + n for n in range(first, num_full)]


def test_a_layer_missing_leaves_it_incomplete() -> None:
    put = StorePut([b"a" * 16], 0, NUM_LAYERS)
    put.collect(output(0, 0, 1))
    assert not put.is_complete
