"""Loads, bytes, and what a move would make of them."""

import pytest
from balancing_plant import MEMORY_BYTES, NUM_BLOCKS, SHAPE, device
from hypothesis import given
from hypothesis import strategies as st

from libs.balancing.device_model import (
    LINK,
    capacity,
    predict_inbound,
    predict_outbound,
    resident_share,
    room_bytes,
    smooth,
)
from libs.balancing.settings import BalancingSettings
from libs.balancing.state import LoopState, observe
from libs.balancing.view import Inbound, Load, MeshView, Outbound
from libs.placement.migration import new_move_id
from libs.placement.module import heads_of, remote_blocks, whole_layers
from libs.placement.placement import PlacedModule, all_at_owner

SHARE = st.floats(0.0, 1.0)


def with_away(worker, *placed, **facts):
    placement = all_at_owner(worker, SHAPE.num_layers, SHAPE.num_kv_heads)
    for one in placed:
        placement = placement.with_module(one)
    return device(worker, placement=placement, **facts)


def away(module, num_blocks=NUM_BLOCKS, move_id="m", **facts):
    return PlacedModule(move_id=move_id, module=module, worker="host", num_blocks=num_blocks, **facts)


def test_compute_is_what_is_busy_of_the_share_that_a_device_has():
    assert device("d", busy_share=0.125).load.compute == 0.5
    assert device("d", busy_share=0.125, device_share=1.0).load.compute == 0.125


def test_utilization_is_the_weighted_sum_with_a_bounded_queue():
    assert Load(1.0, 1.0, 0.0, 0.0).utilization == pytest.approx(0.9)
    assert Load(0.0, 0.0, 99.0, 0.0).utilization == pytest.approx(0.2)


def test_memory_is_short_only_when_much_of_it_is_taken():
    assert Load(0.2, 0.95, 0.0, 0.0).is_memory_bound
    assert not Load(0.2, 0.4, 0.0, 0.0).is_memory_bound
    assert not Load(0.9, 0.95, 1.0, 0.0).is_memory_bound


@given(st.lists(st.tuples(SHARE, st.floats(0.01, 5.0)), min_size=1))
def test_smoothed_loads_stay_between_what_was_seen(seen):
    smoothed = None
    for share, seconds in seen:
        smoothed = smooth(smoothed, device("d", busy_share=share, device_share=1.0), seconds)
    assert smoothed is not None
    values = [share for share, _ in seen]
    for mean in (smoothed.load.compute, smoothed.load.occupancy):
        assert min(values) - 1e-9 <= mean <= max(values) + 1e-9


def test_smoothing_forgets_with_time_not_with_rounds():
    idle = device("d")
    before = device("d", load=Load(1, 1, 1, 1))
    one, many = smooth(before, idle, 2.0), before
    for _ in range(20):
        many = smooth(many, idle, 0.1)
    assert one.load.compute == pytest.approx(many.load.compute)
    assert one.load.occupancy == pytest.approx(many.load.occupancy)


@given(st.lists(st.tuples(SHARE, SHARE, st.floats(0.01, 5.0)), min_size=1))
def test_no_lull_makes_a_whole_devices_steps_look_relieved(seen):
    """All its busy seconds are its own steps', one after the other: it has no time to wait in, ever."""
    host, smoothed = device("host"), None
    for busy, memory, seconds in seen:
        num_used = int(memory * NUM_BLOCKS)
        home = device("home", busy_share=busy, device_share=1.0, num_used_blocks=num_used)
        smoothed = smooth(smoothed, home, seconds)
        move = Outbound("home", "host", whole_layers(0, 8), num_blocks=NUM_BLOCKS)
        after = predict_outbound(move, smoothed, host).owner
        assert after.compute == pytest.approx(smoothed.load.compute)
        assert after.memory == pytest.approx(smoothed.load.memory, abs=1e-3)


def test_blocks_shrink_by_what_is_away_and_more_of_them_fit():
    home = with_away("home", away(heads_of(0, 30, (2,)), num_blocks=0))
    assert resident_share(home.placement) == pytest.approx(2 / 3)
    assert capacity(home, home.placement, MEMORY_BYTES) == pytest.approx(1.5 * NUM_BLOCKS, abs=2)
    granted = with_away("home", away(heads_of(0, 30, (2,)), num_blocks=NUM_BLOCKS + 7))
    assert capacity(granted, granted.placement, MEMORY_BYTES) == NUM_BLOCKS + 7
    lent = with_away("home", away(remote_blocks(30), num_blocks=40))
    assert capacity(lent, lent.placement, MEMORY_BYTES) == NUM_BLOCKS + 40


def test_a_host_gives_neither_what_it_uses_nor_its_least_pool():
    host = device("host", num_used_blocks=100, num_least_blocks=20)
    assert room_bytes(host) == MEMORY_BYTES - 100 * SHAPE.block_bytes
    host = device("host", num_used_blocks=0, num_least_blocks=20, hosted_bytes=MEMORY_BYTES // 2)
    assert room_bytes(host) == MEMORY_BYTES / 2 - 20 * SHAPE.block_bytes


def test_memory_that_others_have_is_missed_only_where_it_is_wanted():
    assert device("d", num_blocks=0).load.memory == 1.0
    assert device("d", num_blocks=100, num_used_blocks=0).load.memory == 0.0
    assert device("d", num_blocks=100, num_used_blocks=50).load.memory == 0.5
    assert device("d", num_blocks=50, num_used_blocks=50).load.memory == 1.0


def test_layers_take_their_part_of_the_work_along():
    home = device("home", busy_share=0.25, queued_seconds=3.0)
    host = device("host", device_share=0.5)
    predicted = predict_outbound(Outbound("home", "host", whole_layers(0, 15)), home, host)
    assert predicted.owner.compute == pytest.approx(0.5)
    assert predicted.host.compute == pytest.approx(0.25), "a device of twice the share is half as busy"
    assert predicted.owner.queue == pytest.approx(1.5)
    assert predicted.num_blocks > NUM_BLOCKS
    assert predicted.overhead_seconds == pytest.approx(2 * LINK.latency_seconds, rel=0.2)


@pytest.mark.parametrize(
    ("device_share", "away_share", "relief"),
    [(0.25, 0.0, 0.5), (1.0, 0.0, 0.0), (0.25, 0.75, 0.0)],
    ids=["its share has time to wait in", "its steps fill all its time", "it waits for others already"],
)
def test_a_home_is_relieved_as_far_as_it_has_time_to_wait(device_share, away_share, relief):
    home = device("home", busy_share=device_share, device_share=device_share, away_share=away_share)
    host, half = device("host"), whole_layers(0, SHAPE.num_layers // 2)
    after = predict_outbound(Outbound("home", "host", half), home, host)
    assert after.owner.compute == pytest.approx(1.0 - relief)


def test_heads_free_memory_and_keep_the_work():
    home = device("home", busy_share=0.1, num_used_blocks=NUM_BLOCKS - 2)
    host = device("host", num_used_blocks=NUM_BLOCKS // 4)
    move = Outbound("home", "host", heads_of(0, 30, (2,)))
    predicted = predict_outbound(move, home, host)
    assert predicted.num_blocks == pytest.approx(1.5 * NUM_BLOCKS, rel=0.01)
    assert predicted.owner.memory == pytest.approx(2 / 3, abs=0.01)
    assert predicted.host.memory == pytest.approx(0.5, abs=0.01), "the quarter that it uses of what is left"
    assert predicted.owner.compute > 0.9 * home.load.compute
    assert predicted.overhead_seconds >= 60 * LINK.latency_seconds


def test_travelling_weights_take_room_and_time_and_give_memory():
    home = device("home", num_used_blocks=NUM_BLOCKS - 2)
    host = device("host", num_used_blocks=NUM_BLOCKS // 4)
    plain, heavy = (
        predict_outbound(Outbound("home", "host", whole_layers(0, 4), with_weights=flag), home, host)
        for flag in (False, True)
    )
    assert heavy.num_blocks > plain.num_blocks
    assert heavy.host.memory > plain.host.memory
    assert heavy.move_seconds > plain.move_seconds


def test_a_full_host_grants_little_and_so_the_home_would_have_less():
    home = device("home", num_used_blocks=NUM_BLOCKS // 2)
    host = device("host", num_used_blocks=NUM_BLOCKS - 5)
    move = Outbound("home", "host", whole_layers(0, 16))
    assert predict_outbound(move, home, host).num_blocks < 20


@given(st.integers(1, 29), st.floats(0.01, 0.2), st.integers(0, NUM_BLOCKS // 2))
def test_there_and_back_again_the_loads_are_what_they_were(num_layers, busy, num_used):
    home = device("home", busy_share=busy, num_used_blocks=num_used)
    host = device("host", busy_share=0.05)
    before_home, before_host = home.load, host.load
    move = Outbound("home", "host", whole_layers(0, num_layers))
    there = predict_outbound(move, home, host)
    placed = away(move.module, there.num_blocks)
    hosted_bytes = int(there.num_blocks * SHAPE.block_bytes * num_layers / 30)
    moved = busy * num_layers / 30
    home = with_away(
        "home", placed, busy_share=busy - moved, num_used_blocks=num_used, num_blocks=there.num_blocks
    )
    host = device("host", busy_share=0.05 + moved, hosted_busy_share=moved, hosted_bytes=hosted_bytes)
    back = predict_inbound(Inbound("home", "host", "m", move.module), home, host)
    assert back.owner.compute == pytest.approx(before_home.compute, rel=0.02)
    assert back.host.compute == pytest.approx(before_host.compute, rel=0.02, abs=1e-3)
    assert back.owner.memory == pytest.approx(before_home.memory, abs=0.02)
    assert back.overhead_seconds == pytest.approx(-there.overhead_seconds)


def test_what_is_not_away_cannot_come_home():
    home, host = device("home"), device("host")
    with pytest.raises(ValueError, match="no module that move never"):
        predict_inbound(Inbound("home", "host", "never", whole_layers(0, 1)), home, host)


def test_placements_say_what_the_loop_moved_and_the_state_since_when():
    old, new, by_hand = (
        new_move_id(at, "00", is_automatic=flag) for at, flag in ((1, True), (2, True), (3, False))
    )
    home = with_away(
        "home",
        away(whole_layers(4, 5), move_id=new),
        away(whole_layers(0, 1), move_id=old),
        away(whole_layers(8, 9), move_id=by_hand),
    )
    state = observe(LoopState(automatic={old: 5.0, "auto-gone": 1.0}), MeshView((home,)), 9.0)
    assert state.automatic == {old: 5.0, new: 9.0}
    assert list(state.automatic) == [old, new]


@pytest.mark.parametrize("facts", [{"delta_lo": 0.3}, {"delta_lo": -0.1}])
def test_thresholds_that_would_make_the_loop_swing_are_refused(facts):
    with pytest.raises(ValueError, match="delta_lo"):
        BalancingSettings(**facts)
