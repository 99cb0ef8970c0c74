"""Rates from noisy measurements: non-negative least squares on relative errors, deaf to outliers. Pure.

Steps that were disturbed (a neighbour on the same core, a page fault storm) take many times as long as
others, so plain least squares is of no use. Measurements far off the fit lose their weight (Tukey's
biweight), starting from a fit that cannot be pulled away: the prior, scaled by the median ratio.
"""

from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_ROUNDS = 8
PRIOR_WEIGHT = 0.02
"""Of the prior against one measurement: it decides only what the measurements leave open."""
FLOOR = 1e-3
"""No rate falls below this part of its scaled prior: a rate of zero predicts nothing."""
MIN_SPREAD = 0.02
"""Relative error that is always taken for noise."""


def fit_rates(features: Floats, seconds: Floats, weights: Floats, prior: Floats) -> Floats:
    """Rates [p] > 0 such that `features @ rates` are about `seconds`.

    `features` [m, p] >= 0, `seconds` [m] > 0, `weights` [m] > 0, `prior` [p] > 0, all finite.
    """
    rates = prior * float(np.median(seconds / (features @ prior)))
    centre = rates
    for _ in range(NUM_ROUNDS):
        predicted = features @ rates
        # By the larger of both: an outlier must not look small for being divided by itself, nor weigh more.
        errors = (seconds - predicted) / np.maximum(predicted, 1e-12)
        spread = max(MIN_SPREAD, 1.4826 * float(np.median(np.abs(errors))))
        trust = weights * np.square(1.0 - np.minimum(1.0, np.square(errors / (4.685 * spread))))
        scaled = features * centre / predicted[:, None]
        rates = centre * _solve(scaled, seconds / predicted, trust)
    return rates


def _solve(scaled: Floats, targets: Floats, trust: Floats) -> Floats:
    """The best multiples of the prior, each at least FLOOR."""
    num_rates = scaled.shape[1]
    ridge = PRIOR_WEIGHT * np.eye(num_rates)
    matrix = (scaled * trust[:, None]).T @ scaled + ridge
    vector = scaled.T @ (trust * targets) + ridge.sum(axis=1)
    solution: Floats = np.linalg.solve(matrix, vector)
    if solution.min() >= FLOOR:
        return solution
    return _solve_bounded(matrix, vector)


def _solve_bounded(matrix: Floats, vector: Floats) -> Floats:
    """Minimum of the convex quadratic with all values >= FLOOR: tries every set of them at the bound."""
    num_rates = len(vector)
    best = np.full(num_rates, FLOOR)
    best_loss = _loss(matrix, vector, best)
    for free in product((False, True), repeat=num_rates):
        if not any(free):
            continue
        mask = np.array(free)
        trial = np.full(num_rates, FLOOR)
        held = matrix[mask][:, ~mask] @ trial[~mask]
        trial[mask] = np.linalg.solve(matrix[mask][:, mask], vector[mask] - held)
        loss = _loss(matrix, vector, trial)
        if trial.min() >= FLOOR and loss < best_loss:
            best, best_loss = trial, loss
    return best


def _loss(matrix: Floats, vector: Floats, values: Floats) -> float:
    return float(0.5 * values @ matrix @ values - vector @ values)
