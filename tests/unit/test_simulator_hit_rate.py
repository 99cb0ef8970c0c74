"""Hit rates of the live block tree over a trace."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_hit_rate import hit_rate

from libs.simulator.trace import TraceRequest


def request_of(path: list[int], now: float) -> TraceRequest:
    """A chain: each id's name depends on all before it."""
    names = [bytes(path[: end + 1]).ljust(16, b"\xff") for end in range(len(path))]
    return TraceRequest(now, 16 * len(path), 1, names)


CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)


@given(CHAINS, st.integers(6, 30))
def test_with_room_for_every_chain_the_tree_finds_as_much_as_plain_lru(chains, num_blocks):
    requests = [request_of(chain, float(now)) for now, chain in enumerate(chains)]
    lru: OrderedDict[bytes, None] = OrderedDict()
    num_found = 0
    for request in requests:
        found = next((n for n, name in enumerate(request.names) if name not in lru), len(request.names))
        num_found += found
        for name in reversed(request.names):
            lru[name] = None
            lru.move_to_end(name)
        while len(lru) > num_blocks:
            lru.popitem(last=False)
    num_asked = sum(len(request.names) for request in requests)
    # Among blocks used at the same time either may go first, so single blocks may differ.
    assert abs(hit_rate(requests, num_blocks) - num_found / num_asked) <= 0.1


def test_a_trace_without_blocks_has_no_hits():
    assert hit_rate([TraceRequest(0.0, 10, 1, [])], 100) == 0.0


def test_a_prompt_longer_than_the_store_is_held_as_far_as_it_goes():
    request = request_of([1] * 10, 0.0)
    assert hit_rate([request, request], 4) == pytest.approx(4 / 20)
