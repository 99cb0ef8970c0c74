"""The pure parts of the coordinator: leadership, rounds, what the loop sees of the workers."""

import msgspec
import pytest
from balancing_plant import SHAPE

from libs.balancing.view import DeviceSnapshot, Role, RoundReport
from libs.bus.messages.migration import PlacementUpdate
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.config.errors import BadSetting
from libs.cost.load import WorkerLoad
from libs.mesh.cluster_state import ClusterState
from libs.placement.placement import all_at_owner
from libs.runtime.roster import Roster
from services.migration_coordinator.devices import view_of
from services.migration_coordinator.rounds import MAX_ANSWER_BYTES, RoundLog
from services.migration_coordinator.service import Leadership
from services.migration_coordinator.settings import CoordinatorSettings, balancing_of


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


def heard(cluster: ClusterState, worker: str, now: float, sequence: int = 1, **load: float) -> None:
    report = LoadReport(
        kind=ServiceKind.DECODE_WORKER,
        incarnation=worker,
        sequence=sequence,
        load=WorkerLoad(**load),  # type: ignore[arg-type]  # fields by name
    )
    cluster.hear_load(report, now)


def cluster_of(*members: Presence) -> ClusterState:
    roster = Roster()
    for member in members:
        roster.seen(member, 0.0)
    return ClusterState(roster)


def test_only_workers_of_whom_all_is_known_and_fresh_are_seen():
    cluster = cluster_of(
        presence("a", "a1"),
        presence("b", "b1", state=ServiceState.DRAINING),
        presence("c", "c1", num_layers=0),
        presence("d", "d1"),
        presence("e", "e1", kind=ServiceKind.KV_STORE),
    )
    for worker in ("a1", "b1", "c1", "d1", "e1", "stranger"):
        heard(cluster, worker, 10.0)
        if worker != "d1":
            cluster.hear_placement(PlacementUpdate(placement=all_at_owner(worker, 30, 3)), 10.0)
    assert [one.worker for one in view_of(cluster, 12.0).devices] == ["a1"]
    assert view_of(cluster, 12.0).devices[0].num_least_blocks == 7
    assert view_of(cluster, 13.0).devices == ()


def test_late_reports_and_placements_of_older_epochs_change_nothing():
    cluster = cluster_of(presence("a", "a1"))
    heard(cluster, "a1", 10.0, sequence=5, num_running=5)
    heard(cluster, "a1", 10.1, sequence=4, num_running=4)
    new = msgspec.structs.replace(all_at_owner("a1", 30, 3), epoch=3)
    cluster.hear_placement(PlacementUpdate(placement=new), 10.0)
    cluster.hear_placement(PlacementUpdate(placement=all_at_owner("a1", 30, 3)), 10.1)
    (device,) = view_of(cluster, 10.2).devices
    assert (device.num_running, device.placement.epoch) == (5, 3)


def test_a_decode_worker_that_runs_prompts_is_of_both_roles():
    cluster = cluster_of(presence("a", "a1", runs_prompts=True), presence("b", "b1"))
    for worker in ("a1", "b1"):
        heard(cluster, worker, 0.0)
        cluster.hear_placement(PlacementUpdate(placement=all_at_owner(worker, 30, 3)), 0.0)
    assert [one.role for one in view_of(cluster, 0.0).devices] == [Role.BOTH, Role.DECODE]


def test_the_loop_is_told_every_setting_that_it_knows():
    told = balancing_of(CoordinatorSettings(automatic=False, delta_hi=0.5, moves_heads=False))
    assert (told.acts, told.delta_hi, told.moves_heads) == (False, 0.5, False)
    assert balancing_of(CoordinatorSettings()) == type(told)(), "the defaults are the same on both sides"


def test_thresholds_that_contradict_each_other_are_a_bad_setting():
    with pytest.raises(BadSetting, match="delta_lo"):
        balancing_of(CoordinatorSettings(delta_lo=0.5))
