"""The broker dies and comes back, on NATS and in memory."""

import asyncio

import pytest
from bus_scene import (
    AT_ONCE_SECONDS,
    Echo,
    Echoed,
    Note,
    Scene,
    ask,
    echo,
    persist,
    presences,
    soon,
    told_until,
    until,
)

from libs.bus.errors import NoResponders, NotConnected
from libs.bus.message import PresenceEntry


async def test_without_a_broker_everything_fails_at_once(scene: Scene) -> None:
    bus = await scene.bus()
    await bus.serve(Echo, echo)
    await scene.kill_broker()
    assert not bus.is_connected
    async with asyncio.timeout(AT_ONCE_SECONDS):
        for act in (bus.publish(Note()), ask(bus), bus.put_presence("key", b""), bus.delete_presence("key")):
            with pytest.raises(NotConnected):
                await act


async def test_a_request_in_flight_fails_at_once_when_the_broker_dies(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()

    async def never(_: Echo) -> Echoed:
        await asyncio.Event().wait()
        return Echoed("")

    await server.serve(Echo, never)
    asking = asyncio.ensure_future(ask(asker))
    await until(lambda: server.counts.num_running_handlers == 1)
    await scene.kill_broker()
    with pytest.raises(NotConnected, match="answer"):
        await soon(asking, AT_ONCE_SECONDS)


@pytest.mark.parametrize("keeps_store", [True, False], ids=["same-store", "empty-store"])
async def test_a_restarted_broker_finds_everything_going_on(scene: Scene, keeps_store: bool) -> None:
    server, user = await scene.bus(), await scene.bus()
    heard: list[int] = []
    await user.subscribe(Note, lambda note: heard.append(note.number))
    await server.serve(Echo, echo, queue_group="group")
    await server.put_presence("server", b"before")
    async with user.watch_presence() as entries:
        await told_until(entries, PresenceEntry("server", b"before"))
        for round_number in range(1, 3):
            await scene.kill_broker()
            await scene.revive_broker(keeps_store=keeps_store)
            value = str(round_number).encode()
            await persist(lambda value=value: server.put_presence("server", value))
            await told_until(entries, PresenceEntry("server", value))
            assert await persist(lambda: ask(user)) == Echoed("hello")
            await server.publish(Note(number=round_number))
            await until(lambda n=round_number: heard == list(range(1, n + 1)))
            assert await presences(user, 1) == {"server": value}
    assert user.counts.num_reconnects_total == server.counts.num_reconnects_total == 2


async def test_what_is_set_up_while_the_broker_is_away_stands_when_it_is_back(scene: Scene) -> None:
    server, user = await scene.bus(), await scene.bus()
    heard: list[int] = []
    await scene.kill_broker()
    await user.subscribe(Note, lambda note: heard.append(note.number))
    await server.serve(Echo, echo)
    async with user.watch_presence() as entries:
        await scene.revive_broker(keeps_store=True)
        await persist(lambda: server.put_presence("server", b"1"))
        await told_until(entries, PresenceEntry("server", b"1"))
        assert await persist(lambda: ask(user)) == Echoed("hello")
        await server.publish(Note(number=1))
        await until(lambda: heard == [1])


async def test_what_is_closed_while_the_broker_is_away_stays_closed(scene: Scene) -> None:
    bus = await scene.bus()
    heard: list[int] = []
    subscription = await bus.subscribe(Note, lambda note: heard.append(-note.number))
    serving = await bus.serve(Echo, echo)
    await bus.subscribe(Note, lambda note: heard.append(note.number))
    await scene.kill_broker()
    await soon(asyncio.gather(subscription.close(), serving.close()), AT_ONCE_SECONDS)
    await scene.revive_broker(keeps_store=True)
    await persist(lambda: bus.put_presence("key", b""))
    with pytest.raises(NoResponders):
        await ask(bus)
    await bus.publish(Note(number=1))
    await until(lambda: heard == [1])


async def test_a_bus_can_be_closed_while_the_broker_is_away(scene: Scene) -> None:
    bus = await scene.bus()
    await bus.serve(Echo, echo)
    async with bus.watch_presence():
        await scene.kill_broker()
        await soon(bus.close(), AT_ONCE_SECONDS)
