"""Whether a candidate is worth it."""

import pytest

from libs.balancing.scoring import PAYS, worth


@pytest.mark.parametrize(
    ("gain", "cost", "verdict"),
    [
        (0.031, 0.0, PAYS),
        (0.02, 0.0, "would lower the peak by 0.020 only"),
        (0.0004, 0.0, "would not lower the peak"),
        (-0.1, 0.0, "would not lower the peak"),
        (0.1, 2.8, "costs more than it brings"),
        (0.1, 2.7, PAYS),
    ],
)
def test_a_change_is_worth_a_gain_that_exceeds_its_cost(gain: float, cost: float, verdict: str) -> None:
    assert worth(gain, 30 * gain, cost) == verdict
