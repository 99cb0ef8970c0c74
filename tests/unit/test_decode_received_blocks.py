import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.worker.decode.received_blocks import OutOfPlace, ReceivedBlocks


@given(st.data())
def test_it_is_complete_exactly_when_every_block_of_every_layer_arrived_in_any_order(
    data: st.DataObject,
) -> None:
    num_layers, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    num_cached = data.draw(st.integers(0, num_blocks))
    adoption = ReceivedBlocks(num_layers, num_blocks, num_cached)
    missing = {(layer, block) for layer in range(num_layers) for block in range(num_cached, num_blocks)}
    pieces = []
    for layer in range(num_layers):
        cuts = sorted(data.draw(st.sets(st.integers(1, num_blocks), max_size=4)) | {0, num_blocks})
        pieces += [(layer, first, end - first) for first, end in pairwise(cuts)]
    random.Random(data.draw(st.integers())).shuffle(pieces)
    pieces += data.draw(st.lists(st.sampled_from(pieces), max_size=2))
    for layer, first, count in pieces:
        assert adoption.is_complete == (not missing)
        assert adoption.num_missing == len(missing)
        adoption.arrive(layer, 1, first, count)
        missing -= {(layer, block) for block in range(first, first + count)}
    assert adoption.is_complete
    assert not missing


@pytest.mark.parametrize(
    ("layer", "num_layers", "first", "count"),
    [
        (2, 1, 0, 1),
        (-1, 1, 0, 1),
        (1, 2, 0, 1),
        (0, 0, 0, 1),
        (0, 1, 3, 2),
        (0, 1, -1, 2),
        (0, 1, 1, 0),
        (0, 1, 4, 1),
    ],
)
def test_blocks_that_the_sequence_does_not_have_are_refused_and_change_nothing(
    layer: int, num_layers: int, first: int, count: int
) -> None:
    adoption = ReceivedBlocks(num_layers=2, num_blocks=4)
    with pytest.raises(OutOfPlace):
        adoption.arrive(layer, num_layers, first, count)
    assert adoption.num_missing == 8


def test_layers_that_share_a_frame_arrive_together() -> None:
    adoption = ReceivedBlocks(num_layers=3, num_blocks=4, num_cached_blocks=1)
    adoption.arrive(1, 2, 1, 3)
    assert adoption.num_missing == 3
    adoption.arrive(0, 1, 0, 4)
    assert adoption.is_complete
