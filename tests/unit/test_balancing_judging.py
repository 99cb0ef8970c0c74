"""Whether a candidate lowers the peak by as much as the settings ask for."""

import pytest
from balancing_plant import device

from libs.balancing.device_load import DeviceLoad, Smoothed
from libs.balancing.judging import PAYS, judge_flip
from libs.balancing.mesh_view import Flip, MeshView, Role
from libs.balancing.settings import BalancingSettings


@pytest.mark.parametrize(
    ("min_gain", "gain", "verdict"),
    [
        (0.03, 0.031, PAYS),
        (0.03, 0.02, "would lower the peak by 0.020 only"),
        (0.03, 0.0004, "would not lower the peak"),
        (0.0, 0.0004, PAYS),
        (0.0, -0.1, "would not lower the peak"),
    ],
)
def test_a_gain_counts_from_that_of_the_settings_on(min_gain: float, gain: float, verdict: str) -> None:
    settings = BalancingSettings(min_gain=min_gain, flip_seconds=0.0)
    view = MeshView((device("p0", Role.PREFILL), device("d0"), device("d1")))
    # One prefill worker becomes two, or two decode workers one.
    works = "p0" if gain > 0 else "d0"
    load = {"p0": 2 * gain, "d0": -2 * gain}[works] / settings.compute_weight
    loads = {
        one.worker: Smoothed(DeviceLoad(load if one.worker == works else 0.0, 0.0, 0.0), 0.0, 0.0)
        for one in view.devices
    }
    assert judge_flip(Flip("d1", Role.PREFILL), view, loads, settings).verdict == verdict
