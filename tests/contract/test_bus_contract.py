"""One suite for both buses: NATS with a real broker, and memory."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar, assert_type

import msgspec
import pytest

from libs.bus.memory_bus import MemoryBroker, MemoryBus
from libs.bus.nats_bus import NatsBus
from libs.bus.nats_server import NatsServer
from libs.bus.port import (
    Bus,
    BusError,
    HandlerFailed,
    Message,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    Overloaded,
    PresenceEntry,
    Request,
    RequestTimedOut,
    Undecodable,
)

T = TypeVar("T")

SOON_SECONDS = 5.0
"""Nothing here takes that long; a busy machine may."""

AT_ONCE_SECONDS = 1.0
TTL_SECONDS = 1.0


class Note(Message, frozen=True, kw_only=True, tag="note"):
    subject: ClassVar[str] = "test.note"
    number: int = 0
    text: str = ""


class Letter(Message, frozen=True, kw_only=True, tag="letter"):
    subject: ClassVar[str] = "test.{to}.letter"
    text: str


class Forged(Message, frozen=True, kw_only=True, tag="forged"):
    """Travels where notes do, and is none."""

    subject: ClassVar[str] = "test.note"


class Echoed(msgspec.Struct, frozen=True, tag="echoed"):
    text: str


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    why: str


class Echo(Request[Echoed | Declined], frozen=True, kw_only=True, tag="echo"):
    subject: ClassVar[str] = "test.echo"
    answer: ClassVar[object] = Echoed | Declined
    text: str


class ForgedEcho(Request[Echoed], frozen=True, kw_only=True, tag="forged_echo"):
    subject: ClassVar[str] = "test.echo"
    answer: ClassVar[object] = Echoed


class Scene(Protocol):
    """A broker and the buses on it."""

    async def bus(self) -> Bus: ...

    async def kill_broker(self) -> None: ...

    async def revive_broker(self, *, keeps_store: bool) -> None: ...

    async def pass_seconds(self, seconds: float) -> None: ...

    async def close(self) -> None: ...


class MemoryScene:
    def __init__(self) -> None:
        self._now = 0.0
        self._broker = MemoryBroker(presence_ttl_seconds=TTL_SECONDS, clock=lambda: self._now)
        self._buses: list[Bus] = []

    async def bus(self) -> Bus:
        self._buses.append(MemoryBus(self._broker))
        return self._buses[-1]

    async def kill_broker(self) -> None:
        self._broker.stop()

    async def revive_broker(self, *, keeps_store: bool) -> None:
        self._broker.start(keeps_presence=keeps_store)

    async def pass_seconds(self, seconds: float) -> None:
        self._now += seconds

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


class NatsScene:
    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._server = NatsServer(state_dir)
        self._buses: list[Bus] = []

    async def bus(self) -> Bus:
        await self._server.start()
        self._buses.append(
            await NatsBus.connect(self._server.url, name="test", presence_ttl_seconds=TTL_SECONDS)
        )
        return self._buses[-1]

    async def kill_broker(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        await self._server.wait_ended()
        await until(lambda: not any(bus.is_connected for bus in self._buses))

    async def revive_broker(self, *, keeps_store: bool) -> None:
        if not keeps_store:
            shutil.rmtree(self._state_dir)
        await self._server.start()
        await until(lambda: all(bus.is_connected for bus in self._buses))

    async def pass_seconds(self, seconds: float) -> None:
        await asyncio.sleep(seconds)  # the broker's clock is the real one

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        await self._server.stop()


@pytest.fixture(params=["memory", "nats"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    before = asyncio.all_tasks()
    scene: Scene = MemoryScene() if request.param == "memory" else NatsScene(tmp_path / "nats")
    yield scene
    await scene.close()
    if left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        _, running = await asyncio.wait(left, timeout=AT_ONCE_SECONDS)  # what was cancelled ends by itself
        assert not running


async def until(condition: Callable[[], bool], timeout_seconds: float = SOON_SECONDS) -> None:
    """Wait for what another process or task will bring about."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110  # the other end is a process
            await asyncio.sleep(0.005)


async def soon(awaitable: Awaitable[T], seconds: float = SOON_SECONDS) -> T:
    async with asyncio.timeout(seconds):
        return await awaitable


async def echo(request: Echo) -> Echoed | Declined:
    return Echoed(request.text) if request.text else Declined("nothing to echo")


async def persist(act: Callable[[], Awaitable[T]]) -> T:
    """Do it until it succeeds: after a restart the peers come back one after the other."""
    async with asyncio.timeout(SOON_SECONDS):
        while True:
            try:
                return await act()
            except BusError:
                await asyncio.sleep(0.02)


def ask(bus: Bus, text: str = "hello", timeout_seconds: float = 20.0) -> Awaitable[Echoed | Declined]:
    """With a timeout so long that only an answer can come at once."""
    return bus.request(Echo(text=text), timeout_seconds=timeout_seconds)


async def presences(bus: Bus, num_entries: int) -> dict[str, bytes | None]:
    """What a new watcher is told first."""
    async with bus.watch_presence() as entries:
        told = [await soon(anext(entries)) for _ in range(num_entries)]
    return {entry.key: entry.value for entry in told}


async def told_until(entries: AsyncIterator[PresenceEntry], wanted: PresenceEntry) -> list[PresenceEntry]:
    """Everything up to and with `wanted`."""
    told: list[PresenceEntry] = []
    async with asyncio.timeout(SOON_SECONDS):
        while not told or told[-1] != wanted:
            told.append(await anext(entries))
    return told


# --- publish and subscribe


async def test_every_subscriber_hears_every_message_in_order(scene: Scene) -> None:
    sender, listeners = await scene.bus(), [await scene.bus(), await scene.bus()]
    heard: list[list[int]] = [[], []]
    for numbers, bus in zip(heard, listeners, strict=True):
        await bus.subscribe(Note, lambda note, numbers=numbers: numbers.append(note.number))
    for number in range(3000):
        await sender.publish(Note(number=number))
    await until(lambda: all(len(numbers) == 3000 for numbers in heard))
    assert heard == [list(range(3000))] * 2


async def test_a_plain_handler_gets_no_task_of_its_own(scene: Scene) -> None:
    bus = await scene.bus()
    tasks: list[asyncio.Task[None] | None] = []
    await bus.subscribe(Note, lambda _: tasks.append(asyncio.current_task()))
    for _ in range(3):
        await bus.publish(Note())
    await until(lambda: len(tasks) == 3)
    assert len(set(tasks)) == 1


async def test_a_coroutine_handler_sees_one_message_at_a_time(scene: Scene) -> None:
    bus = await scene.bus()
    events: list[str] = []

    async def handle(note: Note) -> None:
        events.append(f"begin {note.number}")
        await asyncio.sleep(0.001)
        events.append(f"end {note.number}")

    await bus.subscribe(Note, handle)
    for number in range(3):
        await bus.publish(Note(number=number))
    await until(lambda: len(events) == 6)
    assert events == [f"{word} {number}" for number in range(3) for word in ("begin", "end")]


async def test_a_letter_reaches_only_its_address(scene: Scene) -> None:
    bus = await scene.bus()
    heard: list[str] = []
    for address in ("anna", "bert"):
        await bus.subscribe(Letter, lambda letter, a=address: heard.append(f"{a}: {letter.text}"), at=address)
    await bus.publish(Letter(text="to bert"), to="bert")
    await bus.publish(Letter(text="to anna"), to="anna")
    await until(lambda: len(heard) == 2)
    assert sorted(heard) == ["anna: to anna", "bert: to bert"]


async def test_of_a_queue_group_one_member_hears_each_message(scene: Scene) -> None:
    sender, members = await scene.bus(), [await scene.bus(), await scene.bus()]
    heard: list[list[int]] = [[], []]
    for numbers, bus in zip(heard, members, strict=True):
        await bus.subscribe(Note, lambda n, numbers=numbers: numbers.append(n.number), queue_group="group")
    for number in range(200):
        await sender.publish(Note(number=number))
    await until(lambda: len(heard[0]) + len(heard[1]) >= 200)
    assert sorted(heard[0] + heard[1]) == list(range(200))
    assert all(heard)


async def test_a_failing_handler_does_not_end_its_subscription(scene: Scene) -> None:
    bus = await scene.bus()
    plain: list[int] = []
    coroutine: list[int] = []

    def fail(note: Note) -> None:
        plain.append(note.number)
        raise RuntimeError("plain")

    async def fail_later(note: Note) -> None:
        coroutine.append(note.number)
        raise RuntimeError("coroutine")

    await bus.subscribe(Note, fail)
    await bus.subscribe(Note, fail_later)
    for number in range(2):
        await bus.publish(Note(number=number))
    await until(lambda: len(plain) == len(coroutine) == 2)
    await until(lambda: bus.counts.num_handlers_failed_total == 4)


async def test_what_is_no_message_of_the_type_is_counted_and_skipped(scene: Scene) -> None:
    bus = await scene.bus()
    heard: list[int] = []
    await bus.subscribe(Note, lambda note: heard.append(note.number))
    await bus.publish(Forged())
    await bus.publish(Note(number=1))
    await until(lambda: heard == [1])
    assert bus.counts.num_undecodable_total == 1


@pytest.mark.parametrize("size_over_bytes", [1, 5 * 2**20])
async def test_a_message_over_the_limit_fails_at_the_sender_at_once_and_names_both_sizes(
    scene: Scene, size_over_bytes: int
) -> None:
    bus = await scene.bus()
    empty_bytes = (
        len(msgspec.msgpack.encode(Echo(text=""))) + 4
    )  # a long string's length takes four bytes more
    text = "x" * (bus.max_payload_bytes - empty_bytes + size_over_bytes)
    with pytest.raises(MessageTooLarge) as caught:
        await soon(ask(bus, text), AT_ONCE_SECONDS)
    assert caught.value.size_bytes == bus.max_payload_bytes + size_over_bytes
    assert caught.value.limit_bytes == bus.max_payload_bytes == 2**20
    assert str(caught.value.size_bytes) in str(caught.value)
    assert str(2**20) in str(caught.value)
    with pytest.raises(MessageTooLarge):
        await bus.publish(Note(text=text))
    with pytest.raises(MessageTooLarge):
        await bus.put_presence("key", text.encode() + b"x" * empty_bytes)


async def test_a_message_of_exactly_the_limit_passes(scene: Scene) -> None:
    bus = await scene.bus()
    heard: list[int] = []
    await bus.subscribe(Note, lambda note: heard.append(len(note.text)))
    empty_bytes = len(msgspec.msgpack.encode(Note())) + 4
    await bus.publish(Note(text="x" * (bus.max_payload_bytes - empty_bytes)))
    await until(lambda: heard == [bus.max_payload_bytes - empty_bytes])


@pytest.mark.parametrize("address", ["", "two.words", "*", ">", "with space", "line\nbreak", "ümlaut"])
async def test_an_address_that_does_not_fit_the_subject_is_refused(scene: Scene, address: str) -> None:
    bus = await scene.bus()
    with pytest.raises(ValueError, match="address"):
        await bus.publish(Letter(text=""), to=address)
    with pytest.raises(ValueError, match="address"):
        await bus.subscribe(Letter, lambda _: None, at=address)


async def test_an_address_for_a_message_to_everybody_is_refused(scene: Scene) -> None:
    bus = await scene.bus()
    with pytest.raises(ValueError, match="everybody"):
        await bus.publish(Note(), to="anna")


# --- request and answer


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
    await until(lambda: sum(future.done() for future in asked) == server.counts.num_dropped_total > 0)
    refused = [future for future in asked if future.done()]
    assert all(isinstance(future.exception(), Overloaded) for future in refused)
    assert len(refused) == 2000 - 256 - 1 - 1024  # one is being handed over
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


# --- the end of subscriptions and buses


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


# --- presence


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


# --- the broker dies and comes back


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
