"""A watcher's queue."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.bus.message import PresenceEntry
from libs.bus.presence_watch import PresenceWatch

KEYS = st.sampled_from("abc")


async def drain(watch: PresenceWatch) -> list[PresenceEntry]:
    """All that waits."""
    told: list[PresenceEntry] = []
    while True:
        try:
            async with asyncio.timeout(0):
                told.append(await anext(watch))
        except TimeoutError:
            return told


async def test_changes_of_different_keys_are_told_in_order() -> None:
    watch = PresenceWatch()
    watch.heard("a", b"1")
    watch.heard("b", b"1")
    watch.heard("c", None)
    assert await drain(watch) == [
        PresenceEntry("a", b"1"), PresenceEntry("b", b"1"), PresenceEntry("c", None)
    ]  # fmt: skip


async def test_a_waiting_watcher_is_woken() -> None:
    watch = PresenceWatch()
    upcoming = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    watch.heard("a", b"1")
    assert await upcoming == PresenceEntry("a", b"1")


async def test_what_was_heard_live_is_not_undone_by_an_older_full_state() -> None:
    watch = PresenceWatch()
    watch.begin_filling()
    watch.heard("a", None)
    assert await drain(watch) == [PresenceEntry("a", None)]
    watch.filled("a", b"old")
    watch.filled("b", b"1")
    assert await drain(watch) == [PresenceEntry("b", b"1")]
    watch.begin_filling()
    watch.filled("a", b"new")
    assert await drain(watch) == [PresenceEntry("a", b"new")]


async def test_what_waits_is_told_before_the_end() -> None:
    watch = PresenceWatch()
    watch.heard("a", b"1")
    watch.end()
    assert [entry async for entry in watch] == [PresenceEntry("a", b"1")]
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


@given(st.lists(st.one_of(st.tuples(KEYS, st.binary(max_size=1) | st.none()), st.just("take"))))
def test_a_watcher_ends_up_with_the_latest_of_each_key_and_the_queue_holds_each_key_once(
    events: list[tuple[str, bytes | None] | str],
) -> None:
    async def live() -> None:
        watch = PresenceWatch()
        latest: dict[str, bytes | None] = {}
        told: dict[str, bytes | None] = {}
        waiting: set[str] = set()
        for event in events:
            if isinstance(event, tuple):
                watch.heard(*event)
                latest[event[0]] = event[1]
                waiting.add(event[0])
            elif waiting:
                entry = await anext(watch)
                assert entry.key in waiting
                waiting.remove(entry.key)
                told[entry.key] = entry.value
        rest = await drain(watch)
        assert sorted(entry.key for entry in rest) == sorted(waiting)
        told.update({entry.key: entry.value for entry in rest})
        assert told == latest

    asyncio.run(live())
