"""What a move does next, which orders are followed, and how fast bytes go."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.migration import DenialReason, StartMigration
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.placement.migration import MigrationPhase, is_over
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.placement.placement import PlacedModule, all_at_owner
from libs.worker.migration.owner.migration import (
    FEW_BLOCKS,
    MAX_ROUNDS,
    PIECE_BYTES,
    Pace,
    Progress,
    next_phase,
)
from libs.worker.migration.owner.orders import MigrationRejected, OrderContext, placed_by

_LIVE = [phase for phase in MigrationPhase if not is_over(phase)]
_BACK = MigrationPhase.ROLLING_BACK
FOLLOWS = {
    MigrationPhase.PLANNED: {MigrationPhase.RESERVING, _BACK},
    MigrationPhase.RESERVING: {MigrationPhase.COPYING, _BACK},
    MigrationPhase.COPYING: {MigrationPhase.CATCHING_UP, _BACK},
    MigrationPhase.CATCHING_UP: {MigrationPhase.SWITCHING, _BACK},
    MigrationPhase.SWITCHING: {MigrationPhase.RELEASING, _BACK},
    MigrationPhase.RELEASING: {MigrationPhase.DONE},
    MigrationPhase.ROLLING_BACK: {MigrationPhase.FAILED},
}
HOME = all_at_owner("home-1", 6, 3)
HOST = Presence(
    kind=ServiceKind.DECODE_WORKER,
    name="decode-1",
    incarnation="host-1",
    state=ServiceState.READY,
    hosting_address="memory://1",
    model_fingerprint="same",
)
STANDING = OrderContext(placement=HOME, fingerprint="same")


@given(
    st.sampled_from(_LIVE),
    st.sampled_from(["", "the host was lost"]),
    st.integers(0, 20),
    st.integers(0, 500),
    st.integers(0, 500),
)
def test_every_step_is_one_that_may_follow(
    phase: MigrationPhase, trouble: str, num_rounds: int, num_left: int, num_before: int
) -> None:
    progress = Progress(
        phase=phase,
        trouble=trouble,
        num_rounds=num_rounds,
        num_left_blocks=num_left,
        num_left_before=num_before,
    )
    then = next_phase(progress)
    is_another_round = phase is then is MigrationPhase.CATCHING_UP and not trouble
    assert is_another_round or then in FOLLOWS[phase]


@given(st.lists(st.integers(0, 10_000), min_size=MAX_ROUNDS + 2, max_size=MAX_ROUNDS + 2), st.data())
def test_every_move_ends_whatever_happens_to_it(left: list[int], data: st.DataObject) -> None:
    fails_at = data.draw(st.none() | st.sampled_from(_LIVE))
    progress, num_steps = Progress(phase=MigrationPhase.PLANNED), 0
    while not is_over(progress.phase):
        num_steps += 1
        assert num_steps < 30
        phase, before = next_phase(progress), progress.num_left_blocks
        num_rounds = progress.num_rounds + (phase is MigrationPhase.CATCHING_UP)
        progress = Progress(
            phase=phase,
            trouble="broken" if phase is fails_at or progress.trouble else "",
            num_rounds=num_rounds,
            num_left_blocks=left[num_rounds],
            num_left_before=before,
        )
    gave_up = progress.trouble and fails_at not in (MigrationPhase.RELEASING, MigrationPhase.ROLLING_BACK)
    assert progress.phase is (MigrationPhase.FAILED if gave_up else MigrationPhase.DONE)


def caught_up(num_left: int, num_before: int, num_rounds: int = 1) -> bool:
    progress = Progress(
        phase=MigrationPhase.CATCHING_UP,
        num_rounds=num_rounds,
        num_left_blocks=num_left,
        num_left_before=num_before,
    )
    return next_phase(progress) is MigrationPhase.SWITCHING


def test_a_move_switches_when_little_is_left_or_rounds_do_not_help() -> None:
    assert caught_up(FEW_BLOCKS, 10_000)
    assert not caught_up(500, 1000)
    assert caught_up(900, 1000)
    assert caught_up(500, 1000, num_rounds=MAX_ROUNDS)


def order(module: Module | None = None, **facts: object) -> StartMigration:
    plain = {
        "move_id": "m1",
        "module": module,
        "host": "host-1",
        "expected_epoch": 0,
        "deadline_seconds": 5.0,
    }
    return StartMigration(**{**plain, **facts})  # type: ignore[arg-type]  # facts are given by name


def reason(
    asked: StartMigration, standing: OrderContext = STANDING, host: Presence | None = HOST
) -> DenialReason:
    with pytest.raises(MigrationRejected) as refused:
        placed_by(asked, standing, host)
    assert refused.value.answer.epoch == standing.placement.epoch
    return refused.value.answer.reason


def present(**facts: object) -> Presence:
    return Presence(**{**{name: getattr(HOST, name) for name in HOST.__struct_fields__}, **facts})


def test_a_module_goes_where_the_order_says() -> None:
    placed = placed_by(order(whole_layers(2, 4), with_weights=True), STANDING, HOST)
    assert placed == PlacedModule(
        move_id="m1", module=whole_layers(2, 4), worker="host-1", has_weights_at_owner=False
    )


def test_lent_blocks_are_as_many_as_were_asked_for() -> None:
    assert placed_by(order(remote_blocks(6), num_blocks=9), STANDING, HOST).num_blocks == 9


def test_an_order_for_another_epoch_is_stale() -> None:
    assert reason(order(whole_layers(0, 1), expected_epoch=3)) is DenialReason.STALE_EPOCH


def test_one_move_at_a_time_and_none_while_draining() -> None:
    asked = order(whole_layers(0, 1))
    assert (
        reason(asked, OrderContext(placement=HOME, fingerprint="same", busy_with="m0")) is DenialReason.BUSY
    )
    draining = OrderContext(placement=HOME, fingerprint="same", is_draining=True)
    assert reason(asked, draining) is DenialReason.DRAINING


@pytest.mark.parametrize("module", [whole_layers(0, 6), whole_layers(5, 9), heads_of(0, 2, (0, 1, 2))])
def test_modules_that_cannot_leave_are_invalid(module: Module) -> None:
    assert reason(order(module)) is DenialReason.INVALID


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (None, DenialReason.WORKER_NOT_FOUND),
        (present(state=ServiceState.DRAINING), DenialReason.DRAINING),
        (present(state=ServiceState.STARTING), DenialReason.NOT_READY),
        (present(hosting_address=""), DenialReason.INVALID),
        (present(model_fingerprint="other"), DenialReason.INVALID),
    ],
)
def test_hosts_that_cannot_host_are_refused(host: Presence | None, why: DenialReason) -> None:
    assert reason(order(whole_layers(0, 1)), host=host) is why


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"state": ServiceState.DRAINING}, "decode-1 is about to end: nothing moves to it"),
        (
            {"state": ServiceState.STARTING, "detail": "loading the model"},
            r"decode-1 is not ready yet \(loading the model\); order it again when it is",
        ),
        ({"hosting_address": ""}, "decode-1 hosts no modules: choose another host, or start it without"),
        ({"model_fingerprint": "other"}, "decode-1 has another model, .* choose a host that has the same"),
    ],
)
def test_it_is_said_what_is_wrong_with_a_host_and_what_to_do(facts: dict[str, object], words: str) -> None:
    with pytest.raises(MigrationRejected, match=words):
        placed_by(order(whole_layers(0, 1)), STANDING, present(**facts))


def test_of_what_cannot_come_home_it_is_said_what_is_away() -> None:
    with pytest.raises(MigrationRejected, match="'m7' brought away is away; nothing of this instance is"):
        placed_by(order(returned_move_id="m7"), STANDING, None)
    away = PlacedModule(move_id="m0", module=whole_layers(1, 3), worker="host-1", num_blocks=7)
    standing = OrderContext(placement=HOME.with_module(away), fingerprint="same")
    with pytest.raises(MigrationRejected, match="what is away was brought there by m0"):
        placed_by(order(returned_move_id="m7", expected_epoch=1), standing, None)


def test_nothing_moves_to_its_own_home() -> None:
    assert reason(order(whole_layers(0, 1), host="home-1")) is DenialReason.INVALID


def test_only_what_is_away_comes_home() -> None:
    assert reason(order(returned_move_id="m0")) is DenialReason.NOT_FOUND
    away = PlacedModule(move_id="m0", module=whole_layers(1, 3), worker="host-1", num_blocks=7)
    standing = OrderContext(placement=HOME.with_module(away), fingerprint="same")
    assert placed_by(order(returned_move_id="m0", expected_epoch=1), standing, None) == away


async def test_a_pace_lets_no_more_through_than_its_rate() -> None:
    pace, began = Pace(1_000_000), time.monotonic()
    for _ in range(4):
        await pace.passed(20_000)
    assert time.monotonic() - began >= 0.079
    assert pace.piece_bytes == 250_000


async def test_without_a_rate_nothing_waits() -> None:
    pace = Pace(0)
    await pace.passed(1 << 50)
    assert pace.piece_bytes == PIECE_BYTES
