import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.scheduling.sequence import Arrivals


@given(data=st.data(), num_layers=st.integers(1, 4), num_blocks=st.integers(1, 9))
def test_a_layer_is_whole_when_each_expected_block_was_added(
    data: st.DataObject, num_layers: int, num_blocks: int
) -> None:
    first = data.draw(st.integers(0, num_blocks))
    end = data.draw(st.integers(first, num_blocks))
    arrivals, there = Arrivals(num_layers, num_blocks), np.zeros((num_layers, num_blocks), dtype=bool)
    num_before = data.draw(st.integers(0, 8))
    for number in range(20):
        if number == num_before:
            arrivals.expect(first, end)
        layer, begin = data.draw(st.integers(0, num_layers - 1)), data.draw(st.integers(0, num_blocks - 1))
        stop = data.draw(st.integers(begin + 1, num_blocks))
        arrivals.add(layer, begin, stop)
        there[layer, begin:stop] = True
        assert arrivals.has(layer, begin, stop)
        if number >= num_before:
            whole = [bool(there[one, first:end].all()) for one in range(num_layers)]
            assert [arrivals.is_whole(one) for one in range(num_layers)] == whole
            assert arrivals.are_complete == all(whole)
            missing = np.flatnonzero(~there[:, first:end].all(axis=0)) + first
            assert arrivals.num_whole_blocks == (missing[0] if missing.size else end)
