"""Times predicted for computing and for fetching."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import DEFAULT_FETCH_COST, FetchCost, fetch_seconds
from libs.cost.prefill import DEFAULT_PREFILL_COST, PrefillCost, num_pairs, prefill_seconds
from tests.bench.overlap_formula import overlapped_seconds

TIMES = st.floats(min_value=0, max_value=10)


def when_layers_end(fetch: float, compute: float, num_layers: int, num_buffers: int) -> float:
    """Event by event: a layer is fetched once the one before it is, into a buffer that was computed from."""
    fetched = computed = 0.0
    ends: list[float] = []
    for layer in range(num_layers):
        buffer_free = ends[layer - num_buffers] if layer >= num_buffers else 0.0
        fetched = max(fetched, buffer_free) + fetch
        computed = max(computed, fetched) + compute
        ends.append(computed)
    return computed


@given(TIMES, TIMES, st.integers(1, 80), st.integers(1, 4))
def test_overlap_takes_as_long_as_its_events(fetch, compute, num_layers, num_buffers):
    predicted = overlapped_seconds(fetch, compute, num_layers, num_buffers=num_buffers)
    assert predicted == pytest.approx(when_layers_end(fetch, compute, num_layers, num_buffers))


@given(TIMES, TIMES, st.integers(1, 80))
def test_one_buffer_overlaps_nothing_and_two_hide_the_faster_side(fetch, compute, num_layers):
    alone = num_layers * (fetch + compute)
    assert overlapped_seconds(fetch, compute, num_layers, num_buffers=1) == pytest.approx(alone)
    overlapped = overlapped_seconds(fetch, compute, num_layers)
    assert num_layers * max(fetch, compute) <= overlapped * (1 + 1e-9)
    assert overlapped <= alone * (1 + 1e-9)


def test_of_a_fetch_half_as_long_as_compute_only_its_first_layer_is_seen():
    assert overlapped_seconds(0.5, 1.0, 30) == pytest.approx(30 * 1.0 + 0.5)


def test_behind_a_fetch_twice_as_long_as_compute_only_the_last_layers_compute_is_seen():
    assert overlapped_seconds(2.0, 1.0, 30) == pytest.approx(30 * 2.0 + 1.0)


@pytest.mark.parametrize(
    "arguments", [(-1.0, 1.0, 2, 2), (1.0, -1.0, 2, 2), (1.0, 1.0, 0, 2), (1.0, 1.0, 2, 0)]
)
def test_an_overlap_of_nothing_or_in_the_past_is_refused(arguments):
    fetch, compute, num_layers, num_buffers = arguments
    with pytest.raises(ValueError, match="at least"):
        overlapped_seconds(fetch, compute, num_layers, num_buffers=num_buffers)


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(1, 4096))
def test_prefill_takes_as_long_as_its_steps_one_by_one(num_new, num_context, max_step_tokens):
    cost = PrefillCost(step_seconds=1e-2, token_seconds=1e-4, pair_seconds=1e-8)
    total, left, context = 0.0, num_new, num_context
    while left:
        taken = min(left, max_step_tokens)
        total += 1e-2 + 1e-4 * taken + 1e-8 * taken * (context + taken / 2)
        left, context = left - taken, context + taken
    predicted = prefill_seconds(cost, num_new, num_context, max_step_tokens=max_step_tokens)
    assert predicted == pytest.approx(total)


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 1000), st.integers(0, 1000))
def test_prefill_never_gets_shorter_for_more_tokens_or_context(num_new, num_context, more_new, more_context):
    less = prefill_seconds(DEFAULT_PREFILL_COST, num_new, num_context)
    assert prefill_seconds(DEFAULT_PREFILL_COST, num_new + more_new, num_context) >= less
    assert prefill_seconds(DEFAULT_PREFILL_COST, num_new, num_context + more_context) >= less


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_cached_prefix_saves_what_it_would_have_cost(num_prefix, num_rest):
    cost = PrefillCost(step_seconds=0.0, token_seconds=1e-4, pair_seconds=1e-8)
    whole = prefill_seconds(cost, num_prefix + num_rest, 0)
    parts = prefill_seconds(cost, num_prefix, 0) + prefill_seconds(cost, num_rest, num_prefix)
    assert whole == pytest.approx(parts)


def test_pairs_are_the_tokens_each_new_one_attends_to():
    assert num_pairs(4, 10) == pytest.approx(sum(10 + position + 0.5 for position in range(4)))


@pytest.mark.parametrize(("num_new", "num_context", "max_step"), [(-1, 0, 1), (0, -1, 1), (1, 1, 0)])
def test_counts_that_cannot_be_are_refused(num_new, num_context, max_step):
    with pytest.raises(ValueError, match="negative"):
        prefill_seconds(DEFAULT_PREFILL_COST, num_new, num_context, max_step_tokens=max_step)


def test_a_fetch_takes_its_latency_and_its_bytes():
    cost = FetchCost(latency_seconds=0.01, bytes_per_second=1e6)
    assert fetch_seconds(cost, 500_000) == pytest.approx(0.51)
    assert fetch_seconds(cost, 0) == 0.0


def test_fetches_at_the_same_time_share_the_rate_but_not_the_latency():
    cost = FetchCost(latency_seconds=0.01, bytes_per_second=1e6)
    assert fetch_seconds(cost, 500_000, num_sharing=4) == pytest.approx(2.01)


def test_a_disk_slower_than_the_link_is_what_a_fetch_waits_for():
    cost = FetchCost(latency_seconds=0.0, bytes_per_second=1e6, disk_bytes_per_second=1e5)
    assert fetch_seconds(cost, 1_000_000, num_disk_bytes=1_000_000) == pytest.approx(10.0)
    assert fetch_seconds(cost, 1_000_000, num_disk_bytes=10_000) == pytest.approx(1.0)


def test_a_disk_of_unknown_speed_costs_nothing_extra():
    cost = FetchCost(latency_seconds=0.0, bytes_per_second=1e6)
    assert fetch_seconds(cost, 1_000_000, num_disk_bytes=1_000_000) == pytest.approx(1.0)


@pytest.mark.parametrize(("num_bytes", "num_disk", "sharing"), [(-1, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_bytes_that_cannot_be_are_refused(num_bytes, num_disk, sharing):
    with pytest.raises(ValueError, match="negative"):
        fetch_seconds(DEFAULT_FETCH_COST, num_bytes, num_sharing=sharing, num_disk_bytes=num_disk)


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.integers(1, 64))
def test_a_fetch_never_gets_shorter_for_more_bytes_or_company(num_bytes, more, num_sharing):
    cost = FetchCost(1e-3, 1e9, 2e8)
    less = fetch_seconds(cost, num_bytes, num_sharing=num_sharing)
    assert fetch_seconds(cost, num_bytes + more, num_sharing=num_sharing) >= less
    assert fetch_seconds(cost, num_bytes, num_sharing=num_sharing + 1) >= less
    assert fetch_seconds(cost, num_bytes, num_sharing=num_sharing, num_disk_bytes=num_bytes) >= less
