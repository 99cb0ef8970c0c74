"""The end of subscriptions and buses, on NATS and in memory."""

import asyncio

import pytest
from bus_scene import AT_ONCE_SECONDS, Echo, Echoed, Note, Scene, ask, soon, until

from libs.bus.errors import HandlerFailed, NoResponders, NotConnected


async def test_closing_a_subscription_waits_for_the_handler_in_progress_and_takes_no_more(
    scene: Scene,
) -> None:
    bus, others = await scene.bus(), await scene.bus()
    began, release = asyncio.Event(), asyncio.Event()
    ended: list[int] = []

    async def handle(note: Note) -> None:
        began.set()
        await release.wait()
        ended.append(note.number)

    subscription = await bus.subscribe(Note, handle)
    for number in range(3):
        await others.publish(Note(number=number))
    await began.wait()
    closing = asyncio.ensure_future(subscription.close())
    done, _ = await asyncio.wait({closing}, timeout=0.05)
    assert not done
    release.set()
    await soon(closing)
    assert ended == [0]
    await others.publish(Note(number=4))
    await subscription.close()
    assert ended == [0]
    assert bus.counts.num_waiting_messages == 0


async def test_closing_what_serves_answers_those_in_progress_and_turns_away_the_others(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    release = asyncio.Event()

    async def handle(request: Echo) -> Echoed:
        await release.wait()
        return Echoed(request.text)

    serving = await server.serve(Echo, handle)
    asked = [asyncio.ensure_future(ask(asker, str(number))) for number in range(300)]
    await until(lambda: server.counts.num_waiting_messages == 300 - 256 - 1)
    closing = asyncio.ensure_future(serving.close())
    done, _ = await asyncio.wait({closing}, timeout=0.05)
    assert not done
    release.set()
    await soon(closing)
    answers = await soon(asyncio.gather(*asked, return_exceptions=True))
    assert sum(isinstance(answer, Echoed) for answer in answers) == 256
    assert sum(isinstance(answer, NoResponders) for answer in answers) == 300 - 256
    with pytest.raises(NoResponders):
        await soon(ask(asker), AT_ONCE_SECONDS)
    await serving.close()


async def test_a_handler_may_close_its_own_subscription(scene: Scene) -> None:
    bus = await scene.bus()
    heard: list[int] = []

    async def handle(note: Note) -> None:
        heard.append(note.number)
        await subscription.close()
        heard.append(-note.number)

    async def handle_once(request: Echo) -> Echoed:
        await serving.close()
        return Echoed(request.text)

    subscription = await bus.subscribe(Note, handle)
    serving = await bus.serve(Echo, handle_once)
    for number in range(1, 3):
        await bus.publish(Note(number=number))
    assert await soon(ask(bus)) == Echoed("hello")
    await until(lambda: heard == [1, -1])
    with pytest.raises(NoResponders):
        await ask(bus)


async def test_a_closed_bus_refuses_everything_and_closing_again_is_harmless(scene: Scene) -> None:
    bus = await scene.bus()
    await asyncio.gather(bus.close(), bus.close())
    await bus.close()
    assert not bus.is_connected
    for act in (bus.publish(Note()), ask(bus), bus.put_presence("key", b""), bus.delete_presence("key")):
        with pytest.raises(NotConnected):
            await act
    with pytest.raises(NotConnected):
        await bus.subscribe(Note, lambda _: None)
    with pytest.raises(NotConnected):
        bus.watch_presence()


async def test_closing_a_bus_fails_its_requests_and_those_that_it_was_answering(scene: Scene) -> None:
    server, asker, third = await scene.bus(), await scene.bus(), await scene.bus()

    async def never(_: Echo) -> Echoed:
        await asyncio.Event().wait()
        return Echoed("")

    await server.serve(Echo, never)
    left, stays = asyncio.ensure_future(ask(asker)), asyncio.ensure_future(ask(third))
    await until(lambda: server.counts.num_running_handlers == 2)
    await asker.close()
    with pytest.raises(NotConnected):
        await soon(left, AT_ONCE_SECONDS)
    await server.close()
    with pytest.raises(HandlerFailed, match="cancelled"):
        await soon(stays, AT_ONCE_SECONDS)


async def test_what_was_published_before_closing_arrives(scene: Scene) -> None:
    sender, listener = await scene.bus(), await scene.bus()
    heard: list[int] = []
    await listener.subscribe(Note, lambda note: heard.append(note.number))
    for number in range(100):
        await sender.publish(Note(number=number))
    await sender.close()
    await until(lambda: heard == list(range(100)))
