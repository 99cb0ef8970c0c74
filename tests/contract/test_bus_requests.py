"""Requests and answers, on NATS and in memory."""

import asyncio
from typing import assert_type

import pytest
from bus_scene import (
    AT_ONCE_SECONDS,
    SOON_SECONDS,
    Declined,
    Echo,
    Echoed,
    ForgedEcho,
    Scene,
    ask,
    echo,
    soon,
    until,
)

from libs.bus.errors import HandlerFailed, NoResponders, Overloaded, RequestTimedOut, Undecodable


async def test_a_request_gets_the_answer_of_its_type(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    await server.serve(Echo, echo)
    answer = await asker.request(Echo(text="hello"), timeout_seconds=SOON_SECONDS)
    assert_type(answer, Echoed | Declined)
    assert answer == Echoed("hello")
    assert await ask(asker, "") == Declined("nothing to echo")
    assert asker.counts.num_open_requests == 0


async def test_a_request_that_nobody_serves_fails_at_once(scene: Scene) -> None:
    bus = await scene.bus()
    with pytest.raises(NoResponders):
        await soon(ask(bus), AT_ONCE_SECONDS)


async def test_of_a_queue_group_one_member_answers(scene: Scene) -> None:
    asker, members = await scene.bus(), [await scene.bus(), await scene.bus()]
    for number, bus in enumerate(members):

        async def tell(_: Echo, number: int = number) -> Echoed:
            return Echoed(str(number))

        await bus.serve(Echo, tell, queue_group="group")
    answers = [await ask(asker) for _ in range(40)]
    assert {answer.text for answer in answers if isinstance(answer, Echoed)} == {"0", "1"}


async def test_an_asker_learns_at_once_that_the_handler_failed(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()

    async def handle(request: Echo) -> Echoed:
        if request.text == "bad":
            raise KeyError("no such thing")
        return Echoed(request.text)

    await server.serve(Echo, handle)
    with pytest.raises(HandlerFailed, match=r"Echo: KeyError: 'no such thing'"):
        await soon(ask(asker, "bad"), AT_ONCE_SECONDS)
    assert server.counts.num_handlers_failed_total == 1
    assert await ask(asker, "good") == Echoed("good")


async def test_an_asker_learns_at_once_that_the_answer_is_too_large(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()

    async def handle(_: Echo) -> Echoed:
        return Echoed("x" * 2**21)

    await server.serve(Echo, handle)
    with pytest.raises(HandlerFailed, match=r"answer to Echo has 20971\d\d bytes.* 1048576"):
        await soon(ask(asker), AT_ONCE_SECONDS)


async def test_an_asker_learns_at_once_that_its_request_is_not_understood(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    await server.serve(Echo, echo)
    with pytest.raises(Undecodable, match="Echo"):
        await soon(asker.request(ForgedEcho(), timeout_seconds=20.0), AT_ONCE_SECONDS)
    assert server.counts.num_undecodable_total == 1


async def test_an_answer_of_another_type_is_an_error(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()

    async def handle(_: Echo) -> int:
        return 7

    await server.serve(Echo, handle)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(Undecodable):
        await soon(ask(asker), AT_ONCE_SECONDS)


async def test_a_request_times_out_and_its_late_answer_disturbs_nobody(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    release = asyncio.Event()

    async def handle(request: Echo) -> Echoed:
        if request.text == "slow":
            await release.wait()
        return Echoed(request.text)

    await server.serve(Echo, handle)
    with pytest.raises(RequestTimedOut, match=r"test\.echo within 0\.05 s"):
        await ask(asker, "slow", timeout_seconds=0.05)
    assert asker.counts.num_open_requests == 0
    release.set()
    assert await ask(asker, "quick") == Echoed("quick")


async def test_a_slow_handler_delays_nobody(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    release = asyncio.Event()

    async def handle(request: Echo) -> Echoed:
        if request.text == "slow":
            await release.wait()
        return Echoed(request.text)

    await server.serve(Echo, handle)
    slow = asyncio.ensure_future(ask(asker, "slow"))
    await until(lambda: server.counts.num_running_handlers == 1)
    assert await soon(ask(asker, "quick")) == Echoed("quick")
    release.set()
    assert await soon(slow) == Echoed("slow")
    await until(lambda: server.counts.num_running_handlers == 0)


async def test_requests_over_256_wait_and_those_that_do_not_fit_are_refused_at_once(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    release = asyncio.Event()
    most = 0

    async def handle(request: Echo) -> Echoed:
        nonlocal most
        most = max(most, server.counts.num_running_handlers)
        await release.wait()
        return Echoed(request.text)

    await server.serve(Echo, handle)
    asked = [asyncio.ensure_future(ask(asker, str(number))) for number in range(257)]
    await until(lambda: server.counts.num_running_handlers == 256 and not server.counts.num_waiting_messages)
    asked += [asyncio.ensure_future(ask(asker, str(number))) for number in range(257, 2000)]
    await until(lambda: server.counts.num_waiting_messages == 1024)
    num_refused = 2000 - 256 - 1 - 1024  # one is being handed over
    await until(lambda: sum(future.done() for future in asked) == num_refused)
    assert server.counts.num_dropped_total == num_refused
    refused = [future for future in asked if future.done()]
    assert all(isinstance(future.exception(), Overloaded) for future in refused)
    release.set()
    answers = await soon(asyncio.gather(*(future for future in asked if future not in refused)))
    assert len({answer.text for answer in answers if isinstance(answer, Echoed)}) == len(answers)
    assert most == 256


async def test_a_cancelled_request_leaves_nothing_behind(scene: Scene) -> None:
    server, asker = await scene.bus(), await scene.bus()
    release = asyncio.Event()

    async def handle(request: Echo) -> Echoed:
        await release.wait()
        return Echoed(request.text)

    await server.serve(Echo, handle)
    asking = asyncio.ensure_future(ask(asker))
    await until(lambda: server.counts.num_running_handlers == 1)
    asking.cancel()
    await asyncio.wait({asking})
    assert asker.counts.num_open_requests == 0
    release.set()
    await until(lambda: server.counts.num_running_handlers == 0)
