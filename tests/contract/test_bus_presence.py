"""Presence, on NATS and in memory."""

import asyncio

import pytest
from bus_scene import TTL_SECONDS, Scene, presences, soon, told_until

from libs.bus.message import PresenceEntry


async def test_a_watcher_is_told_what_is_there_and_then_every_change(scene: Scene) -> None:
    putter, watcher = await scene.bus(), await scene.bus()
    await putter.put_presence("anna", b"1")
    await putter.put_presence("anna", b"2")
    await putter.put_presence("bert.left", b"1")
    await putter.put_presence("gone", b"1")
    await putter.delete_presence("gone")
    async with watcher.watch_presence() as entries:
        there = {await soon(anext(entries)), await soon(anext(entries))}
        assert there == {PresenceEntry("anna", b"2"), PresenceEntry("bert.left", b"1")}
        await putter.put_presence("carl", b"1")
        assert await soon(anext(entries)) == PresenceEntry("carl", b"1")
        await putter.delete_presence("anna")
        assert await soon(anext(entries)) == PresenceEntry("anna", None)


async def test_two_watchers_of_one_bus_are_each_told_everything(scene: Scene) -> None:
    bus = await scene.bus()
    async with bus.watch_presence() as first, bus.watch_presence() as second:
        await bus.put_presence("anna", b"1")
        wanted = PresenceEntry("anna", b"1")
        assert await told_until(first, wanted)
        assert await told_until(second, wanted)
    await bus.put_presence("bert", b"1")


async def test_presence_expires_unless_it_is_put_again(scene: Scene) -> None:
    putter = await scene.bus()
    await putter.put_presence("stays", b"1")
    await putter.put_presence("goes", b"1")
    for _ in range(4):
        await scene.pass_seconds(TTL_SECONDS / 2)
        await putter.put_presence("stays", b"2")
    assert await presences(putter, 1) == {"stays": b"2"}
    async with putter.watch_presence() as entries:
        assert await soon(anext(entries)) == PresenceEntry("stays", b"2")
        more = asyncio.ensure_future(anext(entries))
        await putter.put_presence("last", b"1")
        assert await soon(more) == PresenceEntry("last", b"1")


async def test_a_slow_watcher_gets_only_the_latest_of_each_key(scene: Scene) -> None:
    bus = await scene.bus()
    async with bus.watch_presence() as entries:
        for number in range(50):
            await bus.put_presence("anna", str(number).encode())
        await bus.put_presence("last", b"1")
        told = await told_until(entries, PresenceEntry("last", b"1"))
    assert told[-2] == PresenceEntry("anna", b"49")
    assert len(told) <= 52


async def test_a_watch_ends_when_its_bus_is_closed(scene: Scene) -> None:
    bus = await scene.bus()
    async with bus.watch_presence() as entries:
        upcoming = asyncio.ensure_future(anext(entries))
        await asyncio.sleep(0)
        await bus.close()
        with pytest.raises(StopAsyncIteration):
            await soon(upcoming)


@pytest.mark.parametrize("key", ["", ".", "a..b", ".a", "a.", "*", ">", "a b", "a\n"])
async def test_a_presence_key_that_is_no_key_is_refused(scene: Scene, key: str) -> None:
    bus = await scene.bus()
    with pytest.raises(ValueError, match="keys are"):
        await bus.put_presence(key, b"")
    with pytest.raises(ValueError, match="keys are"):
        await bus.delete_presence(key)


async def test_an_error_of_whoever_watches_comes_out_as_it_is(scene: Scene) -> None:
    bus = await scene.bus()
    with pytest.raises(LookupError, match="mine"):
        async with bus.watch_presence():
            raise LookupError("mine")
    await bus.put_presence("anna", b"1")
    assert await presences(bus, 1) == {"anna": b"1"}
