import torch
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.outputs import LayerOutput
from libs.kv.runs import RUN_BLOCKS, runs_of
from libs.worker.stores.prefix_lookup import PrefixLookup, RunLookup
from libs.worker.stores.upload_buffer import UploadBuffer

NUM_LAYERS = 2


def output(layer: int, first_block: int, end: int) -> LayerOutput:
    """Blocks whose content tells layer and index."""
    values = torch.arange(first_block, end, dtype=torch.float32) + 1000 * layer
    return LayerOutput(
        "r", layer, first_block, values.view(-1, 1, 1, 1, 1).expand(-1, 1, 2, 2, 2).contiguous()
    )


def name(block: int) -> bytes:
    return block.to_bytes(16, "big")


def put_of(num_full: int, held: list[int | None], stores: list[str]) -> UploadBuffer:
    runs = [RunLookup(run, store, h) for run, h, store in zip(runs_of(num_full), held, stores, strict=True)]
    return UploadBuffer(
        [name(n) for n in range(num_full)], PrefixLookup(tuple(runs)), NUM_LAYERS, request_id="r"
    )


@given(st.data())
def test_every_store_gets_the_blocks_it_lacks_and_no_others_however_the_prompt_was_cut(
    data: st.DataObject,
) -> None:
    num_full = data.draw(st.integers(1, 3 * RUN_BLOCKS))
    runs = runs_of(num_full)
    held = [data.draw(st.none() | st.integers(0, len(run))) for run in runs]
    stores = [data.draw(st.sampled_from("ab")) for _ in runs]
    lacking = {
        n: store for run, h, store in zip(runs, held, stores, strict=True) if h is not None for n in run[h:]
    }
    if not lacking:
        return
    put = put_of(num_full, held, stores)
    first = put.blocks.start
    handed = data.draw(st.integers(0, first))  # a hand-over may begin behind what the decode worker has
    end = num_full + data.draw(st.booleans())
    for cut in sorted(data.draw(st.sets(st.integers(first + 1, end), max_size=5)) | {end}):
        assert put.is_complete == (handed >= put.blocks.stop)
        for layer in range(NUM_LAYERS):
            put.collect(output(layer, handed, cut))
        handed = cut
    assert put.is_complete
    sent: dict[int, str] = {}
    for store, part in put.parts():
        blocks = [int.from_bytes(one, "big") for one in part.names]
        assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        assert part.parent == (name(blocks[0] - 1) if blocks[0] else b"")
        both = part.take_layers(range(NUM_LAYERS))
        assert both.is_contiguous()
        assert both[:, 0, 0, 0, 0].tolist() == [
            1000 * layer + n for layer in range(NUM_LAYERS) for n in blocks
        ]
        sent |= dict.fromkeys(blocks, store)
    assert sent == lacking


def test_a_layer_missing_leaves_it_incomplete_and_a_restart_empties_it() -> None:
    put = put_of(1, [0], ["a"])
    put.collect(output(0, 0, 1))
    assert not put.is_complete
    put.collect(output(1, 0, 1))
    assert put.is_complete
    put.restart()
    assert not put.is_complete
