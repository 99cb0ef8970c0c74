import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.sampling.distribution import uniform


def draw(seed: int, position: int) -> float:
    return float(uniform(np.array([seed], dtype=np.uint64), np.array([position]))[0])


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
def test_noise_is_in_the_unit_interval_and_a_function_of_seed_and_position(seed: int, position: int) -> None:
    assert 0.0 <= draw(seed, position) < 1.0
    assert draw(seed, position) == draw(seed, position)


def test_a_number_does_not_depend_on_the_others_in_its_batch() -> None:
    seeds, positions = np.arange(50, dtype=np.uint64), np.arange(50)[::-1].copy()
    together = uniform(seeds, positions)
    assert together.tolist() == [draw(int(seed), int(at)) for seed, at in zip(seeds, positions, strict=True)]


def test_neighbouring_seeds_and_positions_give_independent_uniform_numbers() -> None:
    seeds, positions = (axis.ravel() for axis in np.meshgrid(np.arange(200), np.arange(200)))
    numbers = uniform(seeds.astype(np.uint64), positions).reshape(200, 200)
    assert len(np.unique(numbers)) == 40000
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert (((counts - 2000) ** 2) / 2000).sum() < 50  # chi-squared, 19 degrees of freedom
    for first, second in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.02
