"""The cost of a Link, learned from calls: found among noise, deaf to what was held up, never absurd."""

import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from libs.cost.link_estimator import LinkCostEstimator
from libs.cost.migration import DEFAULT_LINK_COST, LinkCost, send_seconds

SIZES = [0, 3_000, 40_000, 500_000, 4_000_000]


def call_seconds(cost: LinkCost, num_bytes: int) -> float:
    """Out and back, half of the bytes each way."""
    return 2 * send_seconds(cost, num_bytes / 2)


def feed(estimator: LinkCostEstimator, cost: LinkCost, num_calls: int, held_up: float = 0.0) -> None:
    chance = random.Random(7)
    for index in range(num_calls):
        num_bytes = SIZES[index % len(SIZES)]
        slower = 20.0 if chance.random() < held_up else 1.0
        estimator.observe(num_bytes, slower * call_seconds(cost, num_bytes) * chance.uniform(0.95, 1.1))


def test_before_any_call_the_prior_is_told() -> None:
    assert LinkCostEstimator().cost == DEFAULT_LINK_COST


@settings(max_examples=40, deadline=None)
@given(st.floats(1e6, 1e10), st.floats(1e-5, 1e-1), st.sampled_from([0.0, 0.15]))
def test_calls_are_predicted_whatever_the_link_is(rate: float, latency: float, held_up: float) -> None:
    assume(rate * latency >= 1500)  # a packet's worth
    true, estimator = LinkCost(rate, latency), LinkCostEstimator()
    feed(estimator, true, 80, held_up)
    for num_bytes in SIZES:
        assert call_seconds(estimator.cost, num_bytes) == pytest.approx(
            call_seconds(true, num_bytes), rel=0.3
        )


def test_a_link_that_became_slower_is_seen_as_such() -> None:
    estimator, slow = LinkCostEstimator(), LinkCost(5e7, 5e-3)
    feed(estimator, LinkCost(1e9, 2e-4), 100)
    feed(estimator, slow, 100)
    assert call_seconds(estimator.cost, 10**6) == pytest.approx(call_seconds(slow, 10**6), rel=0.3)


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "num_messages"),
    [
        (-1, 1.0, 2),
        (math.nan, 1.0, 2),
        (math.inf, 1.0, 2),
        (1, 0.0, 2),
        (1, math.nan, 2),
        (1, -1.0, 2),
        (1, 1.0, 0),
    ],
)
def test_what_cannot_be_is_ignored(num_bytes: float, seconds: float, num_messages: int) -> None:
    estimator = LinkCostEstimator()
    estimator.observe(num_bytes, seconds, num_messages=num_messages)
    assert estimator.cost == DEFAULT_LINK_COST


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(), st.floats(), st.integers(-1, 9)), max_size=30))
def test_the_cost_stays_finite_and_positive_whatever_is_observed(
    calls: list[tuple[float, float, int]],
) -> None:
    estimator = LinkCostEstimator()
    for num_bytes, seconds, num_messages in calls:
        estimator.observe(num_bytes, seconds, num_messages=num_messages)
    for value in (estimator.cost.bytes_per_second, estimator.cost.latency_seconds):
        assert 0 < value < math.inf
