"""The newest load and placement of each worker, and who is meant by a name."""

from gateway_coordinator import DECODE, HEADS_AWAY, PREFILL, at_home, done, hosted, record, told

from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.mesh.cluster_state import ClusterState
from libs.mesh.workers import find_worker
from libs.placement.migration import MigrationPhase
from libs.placement.module import whole_layers
from libs.runtime.roster import Roster


def presence(incarnation: str, name: str = "", **facts: ServiceState) -> Presence:
    kind = ServiceKind.DECODE_WORKER
    known = {"state": ServiceState.READY, **facts}
    return Presence(kind=kind, name=name or incarnation, incarnation=incarnation, **known)


def cluster() -> ClusterState:
    roster = Roster()
    for worker in (DECODE, PREFILL):
        roster.seen(presence(worker), 0.0)
    return ClusterState(roster)


def test_what_is_told_again_is_no_news_and_a_change_is() -> None:
    mesh = cluster()
    first = told(at_home(), hosted=(hosted(whole_layers(0, 1), PREFILL),), moves=(record(),))
    assert mesh.hear_placement(first, 1.0)
    assert not mesh.hear_placement(first, 2.0)
    assert mesh.hear_placement(told(at_home(), moves=(record(),)), 3.0)
    assert mesh.hear_placement(told(HEADS_AWAY, moves=(record(),)), 4.0)
    assert mesh.hear_placement(told(HEADS_AWAY, moves=(done(),)), 5.0)
    assert mesh.hear_placement(told(HEADS_AWAY, num_blocks=9), 5.0), "hosted modules came and took blocks"
    assert not mesh.hear_placement(told(at_home()), 6.0), "of an older epoch"
    heard = mesh.placement(DECODE)
    assert heard is not None
    assert (heard.message.placement.epoch, heard.at) == (1, 5.0)


def test_of_strangers_nothing_is_kept_but_how_their_migrations_ended() -> None:
    mesh = cluster()
    report = LoadReport(kind=ServiceKind.DECODE_WORKER, incarnation="x", sequence=1, load=WorkerLoad())
    mesh.hear_load(report, 0.0)
    assert mesh.loads.get("x") is None
    assert not mesh.hear_placement(told(at_home("x")), 0.0)
    assert not mesh.hear_migration(record(instance="x"), 0.0)
    assert mesh.hear_migration(done(instance="x", move_id="m2"), 0.0)
    assert [one.move_id for one in mesh.migrations.newest_first()] == ["m2"]


def test_who_departs_is_forgotten_with_all_it_was_moving() -> None:
    mesh = cluster()
    report = LoadReport(kind=ServiceKind.DECODE_WORKER, incarnation=DECODE, sequence=1, load=WorkerLoad())
    mesh.hear_load(report, 0.0)
    mesh.hear_placement(told(HEADS_AWAY, moves=(record(),)), 0.0)
    assert [(owner.incarnation, one.move_id) for owner, one in mesh.modules_away()] == [(DECODE, "h1")]
    change = mesh.roster.deleted(DECODE)
    assert [one.phase for one in mesh.roster_changed(change, 1.0)] == [MigrationPhase.FAILED]
    assert mesh.loads.get(DECODE) is None
    assert mesh.placement(DECODE) is None
    assert mesh.modules_away() == []
    assert (mesh.name(PREFILL), mesh.name(DECODE)) == (PREFILL, DECODE)


def test_a_name_means_the_last_that_came_with_it_and_better_one_that_is_ready() -> None:
    ready = [presence("a1", "a"), presence("a2", "a"), presence("b1", "b")]
    assert find_worker(ready, "a") is ready[1]
    assert find_worker(ready, "a1") is ready[0]
    assert find_worker(ready, "nobody") is None
    ends = presence("a3", "a", state=ServiceState.DRAINING)
    assert find_worker([*ready, ends], "a") is ready[1]
    assert find_worker([ends], "a") is ends
