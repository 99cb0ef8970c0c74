"""The virtual clock, and what shares a rate on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.simulator.channel import Channel
from libs.simulator.event_loop import Due, run_events
from libs.simulator.shared_progress import SharedProgress


def test_what_is_due_first_happens_first_and_equals_in_order_of_being_pushed():
    happened: list[tuple[float, str]] = []

    def note(name: str, *then: Due):
        def happens(now: float) -> list[Due]:
            happened.append((now, name))
            return list(then)

        return happens

    late = Due(3.0, note("late"))
    ended = run_events(
        [Due(2.0, note("b")), Due(1.0, note("a", late)), Due(2.0, note("c")), Due(3.0, note("d"))]
    )
    assert happened == [(1.0, "a"), (2.0, "b"), (2.0, "c"), (3.0, "d"), (3.0, "late")]
    assert ended == 3.0


def test_nothing_happens_before_what_it_comes_from():
    past = Due(1.0, lambda now: [])
    with pytest.raises(ValueError, match="already"):
        run_events([Due(2.0, lambda now: [past])])


def test_a_time_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="nan"):
        run_events([Due(float("nan"), lambda now: [])])


TRANSFERS = st.lists(st.tuples(st.floats(0, 100), st.floats(1, 1000)), min_size=1, max_size=12)


def ends_by_small_steps(transfers: list[tuple[float, float]], rate: float) -> list[float]:
    """Between any two arrivals or ends, all that are under way get an equal part of the rate."""
    left = [size for _, size in transfers]
    ends = [0.0] * len(transfers)
    now = 0.0
    while any(left):
        active = [n for n, (start, _) in enumerate(transfers) if start <= now and left[n]]
        arrivals = [start for start, _ in transfers if start > now]
        if not active:
            now = min(arrivals)
            continue
        speed = rate / len(active)
        next_end = now + min(left[n] for n in active) / speed
        until = min([next_end, *arrivals])
        for n in active:
            left[n] -= (until - now) * speed
            if left[n] < 1e-7:
                left[n], ends[n] = 0.0, until
        now = until
    return ends


@given(TRANSFERS)
def test_transfers_share_a_channel_equally(transfers):
    channel = Channel(bytes_per_second=50.0)
    ends = [0.0] * len(transfers)

    def begin(number: int, size: float):
        def ended(now: float) -> list[Due]:
            ends[number] = now
            return []

        return lambda now: channel.begin(size, ended, now)

    run_events([Due(start, begin(n, size)) for n, (start, size) in enumerate(transfers)])
    assert ends == pytest.approx(ends_by_small_steps(transfers, 50.0), rel=1e-6, abs=1e-6)
    assert len(channel) == 0


def test_a_channel_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        Channel(0.0)


def test_members_end_in_the_order_of_what_they_need():
    progress: SharedProgress[str] = SharedProgress()
    progress.join("long", 10.0)
    progress.set_speed(2.0)
    progress.advance(1.0)
    progress.join("short", 3.0)
    assert progress.next_end() == pytest.approx(2.5)
    progress.advance(2.5)
    assert progress.take_ended() == ["short"]
    assert progress.next_end() == pytest.approx(5.0)
    assert len(progress) == 1


def test_nobody_ends_without_speed_or_members():
    progress: SharedProgress[str] = SharedProgress()
    assert progress.next_end() == float("inf")
    progress.join("stuck", 1.0)
    assert progress.next_end() == float("inf")
    assert progress.take_ended() == []
