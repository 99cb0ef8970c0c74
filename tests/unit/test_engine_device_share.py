"""A worker that may be busy for a share of the time only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.engine.hosting.device_turns import BURST_SECONDS, DeviceShare
from libs.engine.settings import EngineSettings


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_the_whole_device_is_never_in_debt() -> None:
    share = DeviceShare(1.0)
    share.spend(1000.0)
    assert share.debt_seconds() == 0.0


def test_a_burst_is_free_and_what_goes_beyond_is_waited_for() -> None:
    clock = Clock()
    share = DeviceShare(0.25, clock=clock)
    share.spend(BURST_SECONDS)
    assert share.debt_seconds() == 0.0
    share.spend(0.1)
    assert share.debt_seconds() == pytest.approx(0.4)
    clock.now += 0.3
    assert share.debt_seconds() == pytest.approx(0.1)
    clock.now += 0.1001
    assert share.debt_seconds() == 0.0


def test_an_idle_worker_saves_up_no_more_than_a_burst() -> None:
    clock = Clock()
    share = DeviceShare(0.5, clock=clock)
    clock.now += 1000
    share.spend(BURST_SECONDS + 1.0)
    assert share.debt_seconds() == pytest.approx(2.0)


def test_settings_refuse_a_share_that_is_none() -> None:
    for wrong in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="device_share"):
            EngineSettings(max_model_len=8, device_share=wrong)
    with pytest.raises(ValueError, match="hosting_timeout_seconds"):
        EngineSettings(max_model_len=8, hosting_timeout_seconds=0.0)
    assert EngineSettings(max_model_len=8, device_share=0.25).device_share == 0.25


@given(
    share_of_time=st.floats(0.05, 0.95),
    pieces=st.lists(st.tuples(st.floats(0.0, 0.2), st.floats(0.0, 0.5)), min_size=1, max_size=60),
)
def test_over_any_window_the_busy_time_stays_within_share_and_burst(
    share_of_time: float, pieces: list[tuple[float, float]]
) -> None:
    """A piece is paid when it is over: so the one that ran last may come on top."""
    clock = Clock()
    share = DeviceShare(share_of_time, clock=clock)
    busy: list[tuple[float, float]] = []
    for seconds, idle in pieces:
        clock.now += idle
        clock.now += share.debt_seconds()
        began = clock.now
        clock.now += seconds
        share.spend(seconds)
        busy.append((began, clock.now))
    longest = max(seconds for seconds, _ in pieces)
    for index, (began, _) in enumerate(busy):
        spent = 0.0
        for first, end in busy[index:]:
            spent += end - first
            assert spent <= share_of_time * (end - began) + BURST_SECONDS + longest + 1e-6


@given(share_of_time=st.floats(0.05, 0.95), seconds=st.floats(0.001, 0.1))
def test_a_worker_that_always_has_work_gets_all_of_its_share(share_of_time: float, seconds: float) -> None:
    clock = Clock()
    share, began, busy = DeviceShare(share_of_time, clock=clock), 50.0, 0.0
    while clock.now < began + 20:
        clock.now += share.debt_seconds()
        clock.now += seconds
        share.spend(seconds)
        busy += seconds
    assert busy >= share_of_time * (clock.now - began) - 1e-6
