"""Times of arrivals: their rate, their burstiness, the same again for the same seed."""

import itertools
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import bursty, constant, on_off, poisson

RATES = st.floats(0.1, 100)
SEEDS = st.integers(0, 1000)


def first(times: Iterator[float], num: int) -> list[float]:
    return list(itertools.islice(times, num))


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_constant_arrivals_are_evenly_spaced_from_the_start_on() -> None:
    assert first(constant(4), 5) == [0, 0.25, 0.5, 0.75, 1.0]
    assert first(constant(float("inf")), 3) == [0, 0, 0]


@given(RATES, SEEDS, st.floats(0.1, 10), st.floats(0.1, 10))
def test_times_rise_and_a_seed_gives_them_again(rate: float, seed: int, one: float, other: float) -> None:
    for make in (
        lambda: poisson(rate, seed),
        lambda: bursty(rate, one, seed),
        lambda: on_off(rate, one, other, seed),
    ):
        times = first(make(), 50)
        assert times == sorted(times)
        assert times == first(make(), 50)
        assert times[0] >= 0


def test_another_seed_gives_other_times() -> None:
    assert first(poisson(1, 1), 5) != first(poisson(1, 2), 5)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_rate_is_as_asked_for_and_the_gaps_vary_with_burstiness(burstiness: float) -> None:
    between = gaps(first(bursty(5.0, burstiness, seed=1), 20_000))
    assert statistics.mean(between) == pytest.approx(0.2, rel=0.05)
    varied = statistics.variance(between) / statistics.mean(between) ** 2
    assert varied == pytest.approx(1 / burstiness, rel=0.1)


def test_poisson_is_burstiness_one() -> None:
    assert first(poisson(3, 7), 20) == first(bursty(3, 1.0, 7), 20)


@given(SEEDS)
def test_on_off_is_silent_while_off_and_has_its_rate_over_both(seed: int) -> None:
    times = first(on_off(10.0, 2.0, 8.0, seed), 1000)
    assert all(time % 10.0 <= 2.0 for time in times)
    assert times[-1] == pytest.approx(100, rel=0.2)
