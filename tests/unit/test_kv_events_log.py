"""The log that waits for publication, and the pages of a snapshot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.messages.kv_events import Cleared, KvEvent, Removed, Stored, Tier
from libs.kv_events.log import KvEventLog
from libs.kv_events.snapshots import TOO_LATE, SnapshotPages

NAMES = [bytes([n]) * 16 for n in range(12)]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "cleared"]),
        st.sampled_from([Tier.DRAM, Tier.DISK]),
        st.lists(st.sampled_from(NAMES), max_size=5),
    ),
    max_size=30,
)


def after(events: list[KvEvent]) -> set[tuple[Tier, bytes]]:
    held: set[tuple[Tier, bytes]] = set()
    for event in events:
        if isinstance(event, Cleared):
            held = {(tier, name) for tier, name in held if tier is not event.tier}
            continue
        named = {(event.tier, event.names[at : at + 16]) for at in range(0, len(event.names), 16)}
        held = held | named if isinstance(event, Stored) else held - named
    return held


def tell(log: KvEventLog, verb: str, tier: Tier, names: list[bytes]) -> KvEvent:
    if verb == "cleared":
        log.cleared(tier)
        return Cleared(tier)
    if verb == "stored":
        log.stored(tier, names)
        return Stored(tier, b"".join(names))
    log.removed(tier, names)
    return Removed(tier, b"".join(names))


@given(CHANGES, st.integers(1, 4))
def test_batches_of_any_size_tell_the_same_as_the_changes_one_by_one(
    changes: list[tuple[str, Tier, list[bytes]]], max_names: int
) -> None:
    log = KvEventLog(max_names=1000)
    told = [tell(log, *change) for change in changes]
    batches: list[list[KvEvent]] = []
    while log.is_due:
        batches.append(log.take(max_names))
    assert after([event for batch in batches for event in batch]) == after(told)
    assert log.sequence == len(batches)
    assert log.num_waiting_names == 0
    for batch in batches:
        assert sum(1 if isinstance(e, Cleared) else len(e.names) // 16 for e in batch) <= max_names


@given(CHANGES, st.integers(1, 20))
def test_what_waits_is_bounded_and_what_is_dropped_leaves_a_gap(
    changes: list[tuple[str, Tier, list[bytes]]], max_names: int
) -> None:
    log = KvEventLog(max_names)
    for change in changes:
        overflows, sequence = log.num_overflows_total, log.sequence
        tell(log, *change)
        assert log.num_waiting_names <= max_names
        assert log.sequence - sequence == log.num_overflows_total - overflows
        assert log.num_overflows_total == overflows or log.is_due


def test_changes_of_one_sort_in_a_row_become_one_event() -> None:
    log = KvEventLog(100)
    for name in NAMES[:3]:
        log.stored(Tier.DRAM, [name])
    log.removed(Tier.DRAM, NAMES[:1])
    assert log.take(100) == [
        Stored(Tier.DRAM, b"".join(NAMES[:3])),
        Removed(Tier.DRAM, NAMES[0]),
    ]


def test_a_new_log_is_due_so_that_its_publisher_is_heard_of_at_once() -> None:
    log = KvEventLog(100)
    assert log.is_due
    assert log.take(10) == []
    assert (log.sequence, log.is_due) == (1, False)


def test_names_of_another_length_are_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        KvEventLog(100).stored(Tier.DRAM, [b"short"])
    with pytest.raises(ValueError, match="max_names is 0"):
        KvEventLog(0)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(Tier)), st.lists(st.sampled_from(NAMES), max_size=9)), max_size=8
    ),
    st.integers(1, 5),
    st.none() | st.integers(0, 20),
)
def test_pages_tell_all_that_is_held_and_asked_for_and_each_once(
    holdings: list[tuple[Tier, list[bytes]]], page_names: int, max_names: int | None
) -> None:
    pages = SnapshotPages(page_names)
    page = pages.begin(holdings, 7, max_names)
    told = [page]
    while page.next_page:
        page = pages.turn(page.next_page)
        told.append(page)
    assert all(page.sequence == 7 for page in told)
    assert all(len(stored.names) > 0 for page in told for stored in page.stored)
    assert all(sum(len(s.names) for s in page.stored) <= 16 * page_names for page in told)
    flat = [
        (s.tier, s.names[at : at + 16]) for p in told for s in p.stored for at in range(0, len(s.names), 16)
    ]
    held = [(tier, name) for tier, names in holdings for name in names]
    places = [sum(tier is earlier for earlier, _ in held[:at]) for at, (tier, _) in enumerate(held)]
    assert flat == [
        one for one, place in zip(held, places, strict=True) if max_names is None or place < max_names
    ]
    assert len(pages) == 0


def test_a_page_asked_for_twice_or_given_up_is_too_late() -> None:
    pages = SnapshotPages(1, max_walks=2)
    walks = [pages.begin([(Tier.DRAM, NAMES[:4])], 1).next_page for _ in range(3)]
    assert pages.turn(walks[0]) == TOO_LATE
    assert pages.turn(walks[1]).stored == [Stored(Tier.DRAM, NAMES[1])]
    assert pages.turn(walks[1]) == TOO_LATE
    assert len(pages) == 2
