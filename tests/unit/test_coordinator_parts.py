"""The pure parts of the coordinator: leadership, history, rounds, what is known of the workers."""

import msgspec
import pytest
from balancing_plant import SHAPE
from hypothesis import given
from hypothesis import strategies as st

from libs.balancing.view import DeviceSnapshot, Role, RoundReport
from libs.bus.messages.migration import MoveRecord, PlacementTold
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState, WorkerLoad
from libs.config.errors import BadSetting
from libs.placement.module import whole_layers
from libs.placement.phases import MovePhase, is_over
from libs.placement.placement import all_home
from services.migration_coordinator.answers import MAX_ANSWER_BYTES
from services.migration_coordinator.cluster import Cluster
from services.migration_coordinator.leadership import Leadership
from services.migration_coordinator.moves import Moves
from services.migration_coordinator.rounds import RoundLog
from services.migration_coordinator.settings import CoordinatorSettings, balancing_of


def record(move_id: str, phase: MovePhase = MovePhase.COPYING, instance: str = "home") -> MoveRecord:
    return MoveRecord(
        move_id=move_id,
        instance=instance,
        host="host",
        module=whole_layers(0, 1),
        phase=phase,
        expected_epoch=0,
        epoch=0,
        started_unix_seconds=0.0,
    )


def test_leadership_ends_with_its_lease_by_the_time_of_the_question():
    leadership = Leadership(3.0)
    assert not leadership.is_ours(0.0, 0)
    leadership.answered(is_held=True, asked_at=10.0, connection=0)
    assert leadership.is_ours(12.9, 0)
    assert not leadership.is_ours(13.0, 0)


def test_leadership_ends_with_the_connection_and_when_the_lease_is_anothers():
    leadership = Leadership(3.0)
    leadership.answered(is_held=True, asked_at=10.0, connection=0)
    assert not leadership.is_ours(10.1, 1)
    leadership.answered(is_held=True, asked_at=10.2, connection=1)
    assert leadership.is_ours(10.3, 1)
    leadership.answered(is_held=False, asked_at=11.0, connection=1)
    assert not leadership.is_ours(11.1, 1)
    leadership.answered(is_held=True, asked_at=12.0, connection=1)
    leadership.end()
    assert not leadership.is_ours(12.1, 1)


def test_what_a_home_tells_goes_before_what_was_ordered_and_an_end_is_final():
    moves = Moves(10, 60.0)
    moves.ordered(record("a", MovePhase.PLANNED), 0.0)
    moves.told(record("a", MovePhase.DONE), 1.0)
    moves.told(record("a", MovePhase.COPYING), 2.0)
    found = moves.get("a")
    assert found is not None
    assert found.phase is MovePhase.DONE
    assert not moves.under_way()


def test_a_move_that_its_home_does_not_tell_of_ends_after_a_while():
    moves = Moves(10, 60.0)
    moves.ordered(record("a", MovePhase.PLANNED), 0.0)
    told = PlacementTold(placement=all_home("home", 2, 1))
    assert moves.placement_told(told, 2.0) == []
    assert moves.placement_told(PlacementTold(placement=all_home("other", 2, 1)), 9.0) == []
    assert [one.move_id for one in moves.placement_told(told, 4.0)] == ["a"]
    assert not moves.under_way()


@given(st.permutations([1000.0, 1001.0, 1002.0, 1003.0]))
def test_the_newest_come_first_in_whatever_order_a_new_leader_hears_of_them(started):
    moves = Moves(10, 60.0)
    for at in started:
        moves.told(msgspec.structs.replace(record(str(at), MovePhase.DONE), started_unix_seconds=at), 0.0)
    told = [one.started_unix_seconds for one in moves.newest_first()]
    assert told == [1003.0, 1002.0, 1001.0, 1000.0]


def test_a_home_that_was_thought_to_be_gone_has_the_last_word_on_how_its_move_ended():
    moves = Moves(10, 60.0)
    moves.told(record("a"), 0.0)
    assert [one.error for one in moves.departed("home", 1.0)] == ["its home left the mesh"]
    moves.told(record("a"), 2.0)  # late
    assert [one.phase for one in moves.newest_first()] == [MovePhase.FAILED]
    moves.told(record("a", MovePhase.DONE), 3.0)
    assert [one.phase for one in moves.newest_first()] == [MovePhase.DONE]
    moves.told(record("a"), 4.0)
    assert not moves.under_way()


def test_overdue_moves_are_told_of_once():
    moves = Moves(10, 60.0)
    moves.told(record("a"), 0.0)
    assert moves.take_overdue(64.0) == []
    assert [one.move_id for one in moves.take_overdue(66.0)] == ["a"]
    assert moves.take_overdue(90.0) == []
    moves.fail("a", "abandoned", 91.0)
    assert not moves.under_way()


@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(list(MovePhase))), max_size=60))
def test_the_history_is_bounded_and_forgets_only_what_is_over(told):
    moves = Moves(4, 60.0)
    alive: dict[str, bool] = {}
    for number, phase in told:
        name = str(number)
        if alive.get(name, True) or moves.get(name) is None:
            alive[name] = not is_over(phase)
        moves.told(record(name, phase), 0.0)
        assert {one.move_id for one in moves.under_way()} == {name for name, lives in alive.items() if lives}
        over = [one for one in moves.newest_first() if is_over(one.phase)]
        assert len(over) <= max(1, 4)


def seen(number: int, num_devices: int = 1) -> RoundReport:
    one = DeviceSnapshot(
        worker="w" * 16, name="n", role="decode", compute=0.0, memory=0.0, queue=0.0, utilization=0.0
    )
    return RoundReport(
        number=number,
        unix_seconds=0.0,
        devices=(one,) * num_devices,
        gap=0.0,
        is_balancing=False,
        decision="stays",
    )


def test_rounds_are_told_newest_first_and_no_more_than_an_answer_holds():
    rounds = RoundLog()
    assert rounds.newest_first(5) == ()
    for number in range(300):
        rounds.add(seen(number))
    assert [one.number for one in rounds.newest_first(3)] == [299, 298, 297]
    assert len(rounds.newest_first(200)) == 200
    for number in range(100):
        rounds.add(seen(number, num_devices=1000))
    told = rounds.newest_first(200)
    assert 1 <= len(told) < 20
    assert len(msgspec.msgpack.encode(told)) <= MAX_ANSWER_BYTES + 16


def presence(name: str, incarnation: str, **facts: object) -> Presence:
    return Presence(
        **{  # type: ignore[arg-type]  # fields by name
            "kind": ServiceKind.DECODE_WORKER,
            "name": name,
            "incarnation": incarnation,
            "state": ServiceState.READY,
            "max_model_len": 100,
            "hosting_address": "there",
            **{field: getattr(SHAPE, field) for field in SHAPE.__struct_fields__ if field != "block_size"},
            "block_bytes": SHAPE.block_bytes,
            **facts,
        }
    )


def heard(cluster: Cluster, worker: str, now: float, sequence: int = 1, **load: float) -> None:
    report = LoadReport(
        kind=ServiceKind.DECODE_WORKER,
        incarnation=worker,
        sequence=sequence,
        load=WorkerLoad(**load),  # type: ignore[arg-type]  # fields by name
    )
    cluster.hear_load(report, now)


def test_only_workers_of_whom_all_is_known_and_fresh_are_seen():
    cluster = Cluster(3.0)
    cluster.set_members(
        [
            presence("a", "a1"),
            presence("b", "b1", state=ServiceState.DRAINING),
            presence("c", "c1", num_layers=0),
            presence("d", "d1"),
            presence("e", "e1", kind=ServiceKind.KV_STORE),
        ]
    )
    for worker in ("a1", "b1", "c1", "d1", "e1", "stranger"):
        heard(cluster, worker, 10.0)
        if worker != "d1":
            cluster.hear_placement(PlacementTold(placement=all_home(worker, 30, 3)))
    assert [one.worker for one in cluster.view((), 12.0).devices] == ["a1"]
    assert cluster.view((), 12.0).devices[0].num_least_blocks == 7
    assert cluster.view((), 13.0).devices == ()


def test_late_reports_and_placements_of_older_epochs_change_nothing():
    cluster = Cluster(3.0)
    cluster.set_members([presence("a", "a1")])
    heard(cluster, "a1", 10.0, sequence=5, num_running=5)
    heard(cluster, "a1", 10.1, sequence=4, num_running=4)
    new = msgspec.structs.replace(all_home("a1", 30, 3), epoch=3)
    cluster.hear_placement(PlacementTold(placement=new))
    cluster.hear_placement(PlacementTold(placement=all_home("a1", 30, 3)))
    (device,) = cluster.view((), 10.2).devices
    assert (device.num_running, device.placement.epoch) == (5, 3)


def test_a_name_means_the_last_that_came_with_it():
    cluster = Cluster(3.0)
    cluster.set_members([presence("a", "a1"), presence("a", "a2"), presence("b", "b1")])
    found = cluster.find("a")
    assert found is not None
    assert found.incarnation == "a2"
    first = cluster.find("a1")
    assert first is not None
    assert first.incarnation == "a1"
    assert cluster.find("nobody") is None
    assert (cluster.name("b1"), cluster.name("gone")) == ("b", "gone")


def test_a_decode_worker_that_runs_prompts_is_of_both_roles():
    cluster = Cluster(3.0)
    cluster.set_members([presence("a", "a1", runs_prompts=True), presence("b", "b1")])
    for worker in ("a1", "b1"):
        heard(cluster, worker, 0.0)
        cluster.hear_placement(PlacementTold(placement=all_home(worker, 30, 3)))
    assert [one.role for one in cluster.view((), 0.0).devices] == [Role.BOTH, Role.DECODE]


def test_the_loop_is_told_every_setting_that_it_knows():
    told = balancing_of(CoordinatorSettings(automatic=False, delta_hi=0.5, moves_heads=False))
    assert (told.acts, told.delta_hi, told.moves_heads) == (False, 0.5, False)
    assert balancing_of(CoordinatorSettings()) == type(told)(), "the defaults are the same on both sides"


def test_thresholds_that_contradict_each_other_are_a_bad_setting():
    with pytest.raises(BadSetting, match="delta_lo"):
        balancing_of(CoordinatorSettings(delta_lo=0.5))
