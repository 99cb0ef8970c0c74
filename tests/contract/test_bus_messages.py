"""Publish and subscribe, on NATS and in memory."""

import asyncio

import msgspec
import pytest
from bus_scene import AT_ONCE_SECONDS, Echo, Forged, Letter, Note, Scene, ask, soon, until

from libs.bus.errors import MessageTooLarge


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
