"""The history of migrations, from what owners tell in any order."""

from typing import Any

import pytest
from gateway_coordinator import DECODE, PREFILL, done, record
from hypothesis import given
from hypothesis import strategies as st

from libs.mesh.migrations import MAX_HISTORY, Migrations
from libs.placement.migration import MigrationPhase, is_over

COURSES = [
    [MigrationPhase.PLANNED, MigrationPhase.RESERVING, MigrationPhase.COPYING, MigrationPhase.CATCHING_UP,
     MigrationPhase.SWITCHING, MigrationPhase.RELEASING, MigrationPhase.DONE],
    [MigrationPhase.PLANNED, MigrationPhase.RESERVING, MigrationPhase.COPYING, MigrationPhase.ROLLING_BACK,
     MigrationPhase.FAILED],
]  # fmt: skip


@given(st.sampled_from(COURSES), st.data())
def test_in_whatever_order_phases_come_the_last_one_stays(
    course: list[MigrationPhase], data: st.DataObject
) -> None:
    history = Migrations()
    for phase in data.draw(st.permutations(course)):
        history.hear(record(phase), 0.0)
    assert history.newest_first() == [record(course[-1])]


def test_an_owner_that_was_thought_to_be_gone_has_the_last_word_on_how_it_ended() -> None:
    history = Migrations()
    history.hear(record(), 1000.0)
    assert [one.error for one in history.owner_departed(DECODE, 1002.0)] == ["its home left the mesh"]
    assert not history.hear(record(MigrationPhase.SWITCHING), 1003.0)  # late
    assert [one.phase for one in history.newest_first()] == [MigrationPhase.FAILED]
    assert history.hear(done(), 1004.0)
    assert not history.hear(record(MigrationPhase.RELEASING), 1005.0)
    assert not history.hear(record(MigrationPhase.ROLLING_BACK), 1005.0)
    assert [one.phase for one in history.newest_first()] == [MigrationPhase.DONE]


def test_figures_within_a_phase_are_news() -> None:
    history = Migrations()
    assert history.hear(record(num_kv_bytes=1), 0.0)
    assert history.hear(record(num_kv_bytes=2), 0.0)
    assert not history.hear(record(num_kv_bytes=2), 0.0)


def test_what_its_owner_does_not_tell_of_ends_after_a_while() -> None:
    history = Migrations()
    history.hear(record(MigrationPhase.PLANNED), 0.0)
    assert not history.hear_owner(DECODE, (), 2.0)
    assert not history.hear_owner(PREFILL, (), 9.0)
    assert history.hear_owner(DECODE, (), 4.0)
    (lost,) = history.newest_first()
    assert (lost.phase, lost.error, lost.ended_unix_seconds) == (
        MigrationPhase.FAILED,
        "its home worker does not know it",
        4.0,
    )


def test_what_was_denied_never_was() -> None:
    history = Migrations()
    history.hear(record(MigrationPhase.PLANNED), 0.0)
    history.withdraw("m1")
    history.withdraw("never")
    assert history.newest_first() == []


def test_an_owner_that_left_moves_nothing_any_more() -> None:
    history = Migrations()
    for one in (record(), record(move_id="m2", instance=PREFILL, host=DECODE), done(move_id="m0")):
        history.hear(one, 0.0)
    history.owner_departed(DECODE, 2000.0)
    phases = {one.move_id: (one.phase, one.ended_unix_seconds) for one in history.newest_first()}
    assert phases == {
        "m1": (MigrationPhase.FAILED, 2000.0),
        "m2": (MigrationPhase.COPYING, 0.0),
        "m0": (MigrationPhase.DONE, 1001.5),
    }


def test_one_that_failed_here_fails_once() -> None:
    history = Migrations()
    history.hear(record(), 0.0)
    history.fail("m1", "abandoned", 1.0)
    history.fail("m1", "again", 2.0)
    history.fail("never", "x", 3.0)
    assert [one.error for one in history.newest_first()] == ["abandoned"]
    assert history.under_way() == []


@given(st.permutations([1000.0, 1001.0, 1002.0, 1003.0]))
def test_the_newest_come_first_in_whatever_order_they_are_heard_of(started: list[float]) -> None:
    history = Migrations()
    for at in started:
        history.hear(done(move_id=str(at), started_unix_seconds=at), 0.0)
    assert [one.started_unix_seconds for one in history.newest_first()] == [1003.0, 1002.0, 1001.0, 1000.0]


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
def test_the_history_is_bounded_and_none_under_way_is_forgotten(told: list[tuple[int, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("libs.mesh.migrations.MAX_HISTORY", 4)
        history = Migrations()
        under_way: set[str] = set()
        for number, ends in told:
            name, phase = f"m{number}", MigrationPhase.DONE if ends else MigrationPhase.COPYING
            facts: dict[str, Any] = dict.fromkeys(
                ("started_unix_seconds", "ended_unix_seconds"), float(number)
            )
            known = history.get(name)
            history.hear(record(phase, name, **facts), 0.0)
            if ends:
                under_way.discard(name)
            elif known is None or not is_over(known.phase):
                under_way.add(name)
            assert {one.move_id for one in history.under_way()} == under_way
            assert len(history.newest_first()) <= max(4, len(under_way) + 1)
    assert MAX_HISTORY == 200


def test_the_latest_are_the_newest_and_all_under_way() -> None:
    history = Migrations()
    history.hear(record(move_id="old", started_unix_seconds=1.0), 0.0)
    for number in range(5):
        history.hear(done(move_id=f"m{number}", started_unix_seconds=10.0 + number), 0.0)
    assert [one.move_id for one in history.latest(2)] == ["m4", "m3", "old"]
    assert len(history.latest(50)) == 6
