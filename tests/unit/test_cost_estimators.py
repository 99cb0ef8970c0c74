"""Costs learned from noisy measurements."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.estimators import FetchEstimator, PrefillEstimator
from libs.cost.fetch import DEFAULT_FETCH_COST, FetchCost, fetch_seconds
from libs.cost.prefill import DEFAULT_PREFILL_COST, PrefillCost, num_pairs, prefill_seconds

TRUE = [
    PrefillCost(step_seconds=5e-3, token_seconds=3e-4, pair_seconds=1e-7),
    PrefillCost(step_seconds=1e-4, token_seconds=1e-3, pair_seconds=1e-6),
    PrefillCost(step_seconds=2e-2, token_seconds=2e-5, pair_seconds=5e-9),
]


def disturbed(seconds: float, noise: np.random.Generator) -> float:
    """A tenth of noise, and one in five measurements many times too long."""
    outlier = noise.uniform(3, 30) if noise.random() < 0.2 else 1.0
    return seconds * float(noise.lognormal(0, 0.1)) * float(outlier)


def watch_steps(estimator: PrefillEstimator, true: PrefillCost, count: int, seed: int) -> None:
    noise = np.random.default_rng(seed)
    for _ in range(count):
        num_new, context = int(2 ** noise.uniform(0, 11)), int(2 ** noise.uniform(0, 14))
        estimator.observe(num_new, context, disturbed(prefill_seconds(true, num_new, context), noise))


@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("seed", range(4))
def test_prefill_cost_is_found_through_noise_and_outliers(true, seed):
    estimator = PrefillEstimator()
    watch_steps(estimator, true, 600, seed)
    for num_new, context in [(1, 100), (64, 0), (512, 4096), (2048, 0), (2048, 16_000)]:
        predicted = prefill_seconds(estimator.cost, num_new, context)
        assert predicted == pytest.approx(prefill_seconds(true, num_new, context), rel=0.15)
    assert estimator.cost.token_seconds == pytest.approx(true.token_seconds, rel=0.3)


def test_a_few_steps_are_enough_for_a_usable_prediction():
    estimator = PrefillEstimator()
    watch_steps(estimator, TRUE[1], 12, seed=1)
    predicted, true = prefill_seconds(estimator.cost, 512, 512), prefill_seconds(TRUE[1], 512, 512)
    assert 0.5 < predicted / true < 2


def test_a_machine_that_becomes_slower_is_seen_as_such():
    slower = PrefillCost(5e-3 * 4, 3e-4 * 4, 1e-7 * 4)
    estimator = PrefillEstimator()
    watch_steps(estimator, TRUE[0], 1000, seed=2)
    watch_steps(estimator, slower, 3000, seed=3)
    predicted = prefill_seconds(estimator.cost, 512, 512)
    assert predicted == pytest.approx(prefill_seconds(slower, 512, 512), rel=0.2)


def test_a_flood_of_small_steps_does_not_make_it_forget_the_large_ones():
    estimator = PrefillEstimator()
    watch_steps(estimator, TRUE[0], 400, seed=4)
    noise = np.random.default_rng(5)
    for _ in range(400):
        estimator.observe(1, 100, disturbed(prefill_seconds(TRUE[0], 1, 100), noise))
    predicted = prefill_seconds(estimator.cost, 2048, 2048)
    assert predicted == pytest.approx(prefill_seconds(TRUE[0], 2048, 2048), rel=0.2)


def test_a_batch_counts_as_the_sum_of_its_sequences():
    estimator = PrefillEstimator()
    noise = np.random.default_rng(6)
    true = TRUE[0]
    for _ in range(400):
        sequences = [
            (int(2 ** noise.uniform(0, 9)), int(2 ** noise.uniform(0, 12)))
            for _ in range(noise.integers(1, 5))
        ]
        num_new, pairs = sum(n for n, _ in sequences), sum(num_pairs(n, c) for n, c in sequences)
        seconds = true.step_seconds + true.token_seconds * num_new + true.pair_seconds * pairs
        estimator.observe_batch(num_new, pairs, disturbed(seconds, noise))
    predicted = prefill_seconds(estimator.cost, 512, 2048)
    assert predicted == pytest.approx(prefill_seconds(true, 512, 2048), rel=0.15)


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 1 << 20),
            st.integers(0, 1 << 20),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=60,
    )
)
def test_prefill_rates_stay_finite_and_above_zero_whatever_is_observed(observations):
    estimator = PrefillEstimator()
    for num_new, context, seconds in observations:
        estimator.observe(num_new, context, seconds)
        cost = estimator.cost
        for rate in (cost.step_seconds, cost.token_seconds, cost.pair_seconds):
            assert math.isfinite(rate)
            assert rate > 0


def test_what_cannot_have_been_measured_changes_nothing():
    estimator = PrefillEstimator()
    for num_new, seconds in [(0, 1.0), (-3, 1.0), (5, 0.0), (5, -1.0), (5, math.nan), (5, math.inf)]:
        estimator.observe(num_new, 10, seconds)
    assert estimator.cost == DEFAULT_PREFILL_COST


def watch_fetches(estimator: FetchEstimator, true: FetchCost, count: int, *, disk: bool, seed: int) -> None:
    noise = np.random.default_rng(seed)
    for number in range(count):
        num_bytes, sharing = int(2 ** noise.uniform(14, 28)), int(noise.integers(1, 5))
        num_disk = num_bytes if disk and number % 3 == 0 else 0
        seconds = fetch_seconds(true, num_bytes, num_sharing=sharing, num_disk_bytes=num_disk)
        estimator.observe(num_bytes, disturbed(seconds, noise), num_sharing=sharing, num_disk_bytes=num_disk)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("true", [FetchCost(3e-3, 3e9), FetchCost(1e-4, 2e8)])
def test_fetch_cost_is_found_through_noise_and_outliers(true, seed):
    estimator = FetchEstimator()
    watch_fetches(estimator, true, 300, disk=False, seed=seed)
    assert estimator.cost.latency_seconds == pytest.approx(true.latency_seconds, rel=0.25)
    assert estimator.cost.bytes_per_second == pytest.approx(true.bytes_per_second, rel=0.15)
    assert estimator.cost.disk_bytes_per_second == 0.0


def test_the_rate_of_a_slower_disk_is_found_beside_the_links():
    estimator = FetchEstimator()
    watch_fetches(estimator, FetchCost(1e-3, 3e9, 4e8), 600, disk=True, seed=7)
    assert estimator.cost.bytes_per_second == pytest.approx(3e9, rel=0.15)
    assert estimator.cost.disk_bytes_per_second == pytest.approx(4e8, rel=0.25)


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 1 << 40),
            st.floats(allow_nan=True, allow_infinity=True),
            st.integers(0, 9),
            st.integers(-1, 1 << 40),
        ),
        max_size=60,
    )
)
def test_fetch_rates_stay_finite_and_above_zero_whatever_is_observed(observations):
    estimator = FetchEstimator()
    for num_bytes, seconds, sharing, num_disk in observations:
        estimator.observe(num_bytes, seconds, num_sharing=sharing, num_disk_bytes=num_disk)
        cost = estimator.cost
        assert math.isfinite(cost.latency_seconds)
        assert cost.latency_seconds > 0
        assert math.isfinite(cost.bytes_per_second)
        assert cost.bytes_per_second > 0
        assert math.isfinite(cost.disk_bytes_per_second)
        assert cost.disk_bytes_per_second >= 0


def test_a_fetch_that_cannot_have_been_changes_nothing():
    estimator = FetchEstimator()
    for num_bytes, seconds, sharing in [(0, 1.0, 1), (5, 0.0, 1), (5, math.nan, 1), (5, 1.0, 0)]:
        estimator.observe(num_bytes, seconds, num_sharing=sharing)
    assert estimator.cost == DEFAULT_FETCH_COST
