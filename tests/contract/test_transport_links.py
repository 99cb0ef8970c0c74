"""What every Link does, whatever carries it."""

import asyncio
import os

import numpy as np
import pytest
from link_pair import BODY_SIZES, MIB, SECONDS, Pair, random_body, send

from libs.transport.memory import Bytes, as_memory
from libs.transport.port import (
    MAX_HEADER_BYTES,
    FrameTooLarge,
    Link,
    LinkLost,
    LinkTimeout,
    Received,
)


async def receive(link: Link) -> Received:
    return await link.receive(timeout_seconds=SECONDS)


async def take(link: Link) -> tuple[bytes, bytes]:
    frame = await receive(link)
    header, body = frame.header, frame.body.tobytes()
    frame.release()
    return header, body


async def test_each_side_knows_the_incarnation_of_the_other(pair: Pair) -> None:
    assert (pair.near.peer, pair.far.peer) == ("far", "near")
    assert pair.near.is_open
    assert pair.far.is_open


async def test_a_frame_without_a_body_arrives_with_an_empty_body(pair: Pair) -> None:
    await send(pair.near, b"header")
    assert await take(pair.far) == (b"header", b"")


async def test_an_empty_header_and_the_largest_header_arrive(pair: Pair) -> None:
    largest = os.urandom(MAX_HEADER_BYTES)
    for header in (b"", largest):
        await send(pair.near, header, random_body(100))
        assert (await take(pair.far))[0] == header


@pytest.mark.parametrize("num_bytes", BODY_SIZES)
async def test_a_body_arrives_as_it_was_sent(pair: Pair, num_bytes: int) -> None:
    body = random_body(num_bytes)
    sending = asyncio.ensure_future(send(pair.near, b"h", body))
    assert await take(pair.far) == (b"h", body.tobytes())
    await sending


async def test_a_body_of_64_mib_larger_than_the_window_arrives_as_it_was_sent(pair: Pair) -> None:
    body = random_body(64 * MIB)
    sending = asyncio.ensure_future(send(pair.near, b"big", body))
    frame = await receive(pair.far)
    assert np.array_equal(frame.body, body)
    frame.release()
    await sending


async def test_frames_of_mixed_sizes_keep_their_order(pair: Pair) -> None:
    bodies = [random_body(size) for size in (MIB, 10, 2 * MIB, 0, 40_000, 1, 3 * MIB, 5) * 4]

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for number, body in enumerate(bodies):
                group.create_task(send(pair.near, str(number).encode(), body))

    sending = asyncio.ensure_future(send_all())
    for number, body in enumerate(bodies):
        assert await take(pair.far) == (str(number).encode(), body.tobytes())
    await sending


async def test_both_sides_may_send_at_once(pair: Pair) -> None:
    near_bodies, far_bodies = ([random_body(size) for size in (MIB, 7, 2 * MIB) * 5] for _ in range(2))

    async def send_all(link: Link, bodies: list[Bytes]) -> None:
        for body in bodies:
            await send(link, b"h", body)

    async def take_all(link: Link) -> list[bytes]:
        return [(await take(link))[1] for _ in range(15)]

    async with asyncio.TaskGroup() as group:
        group.create_task(send_all(pair.near, near_bodies))
        group.create_task(send_all(pair.far, far_bodies))
        at_far, at_near = group.create_task(take_all(pair.far)), group.create_task(take_all(pair.near))
    assert at_far.result() == [body.tobytes() for body in near_bodies]
    assert at_near.result() == [body.tobytes() for body in far_bodies]


async def test_the_body_may_be_reused_once_send_returns(pair: Pair) -> None:
    body = np.zeros(MIB, dtype=np.uint8)
    for number in range(3):
        body[:] = number
        await send(pair.near, b"h", body)
    body[:] = 255
    for number in range(3):
        frame = await receive(pair.far)
        assert frame.body.min() == frame.body.max() == number
        frame.release()


async def test_memory_that_is_no_array_is_sent_from_where_it_lies(pair: Pair) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(100_000, dtype=torch.float32)
    await send(pair.near, b"tensor", as_memory(tensor))
    frame = await receive(pair.far)
    assert np.array_equal(frame.body.view(np.float32), tensor.numpy())
    frame.release()


async def test_a_header_or_body_beyond_the_limits_is_refused_and_the_link_lives_on(pair: Pair) -> None:
    with pytest.raises(FrameTooLarge, match="4097 bytes"):
        await send(pair.near, bytes(MAX_HEADER_BYTES + 1))
    with pytest.raises(FrameTooLarge, match="takes 134217728"):
        await send(pair.near, b"h", np.empty(128 * MIB + 1, dtype=np.uint8))
    await send(pair.near, b"still here")
    assert (await take(pair.far))[0] == b"still here"


@pytest.mark.parametrize("num_bytes", [16, MIB])
async def test_a_receiver_that_does_not_consume_stops_its_sender(pair: Pair, num_bytes: int) -> None:
    num_sent = 0

    async def send_on() -> None:
        nonlocal num_sent
        while True:
            await pair.near.send(b"h", random_body(num_bytes), timeout_seconds=0.5)
            num_sent += 1

    with pytest.raises(LinkTimeout, match="got no credit"):
        await send_on()
    assert num_sent == (8 if num_bytes == 16 else 4)  # the window's frames; the window's bytes
    assert not pair.near.is_open


async def test_frames_that_are_released_let_the_sender_go_on(pair: Pair) -> None:
    sending = asyncio.ensure_future(_send_many(pair.near, 60))
    for number in range(60):
        assert (await take(pair.far))[0] == str(number).encode()
    await sending


async def _send_many(link: Link, num_frames: int) -> None:
    body = random_body(MIB)
    for number in range(num_frames):
        await send(link, str(number).encode(), body)


async def test_a_released_frame_gives_its_credit_once_and_its_body_up(pair: Pair) -> None:
    await send(pair.near, b"h", random_body(10))
    frame = await receive(pair.far)
    frame.release()
    frame.release()
    assert frame.body.nbytes == 0
    await _send_and_take(pair)


async def _send_and_take(pair: Pair) -> None:
    for link, other in ((pair.near, pair.far), (pair.far, pair.near)):
        await send(link, b"well", random_body(MIB))
        assert (await take(other))[0] == b"well"


async def test_a_receive_that_times_out_loses_nothing(pair: Pair) -> None:
    with pytest.raises(LinkTimeout, match="no frame"):
        await pair.far.receive(timeout_seconds=0.02)
    await send(pair.near, b"late")
    assert (await take(pair.far))[0] == b"late"


async def test_a_receive_that_is_cancelled_loses_nothing(pair: Pair) -> None:
    first, second = (asyncio.ensure_future(take(pair.far)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await send(pair.near, b"for the second")
    assert (await second)[0] == b"for the second"


async def test_a_send_cancelled_while_it_waits_for_credit_never_happened(pair: Pair) -> None:
    for _ in range(8):
        await send(pair.near, b"fills the window")
    waiting = asyncio.ensure_future(send(pair.near, b"withdrawn"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for _ in range(8):
        assert (await take(pair.far))[0] == b"fills the window"
    await _send_and_take(pair)


async def test_a_send_cancelled_under_way_ends_before_its_caller_goes_on(pair: Pair) -> None:
    body = random_body(32 * MIB)
    sending = asyncio.ensure_future(send(pair.near, b"h", body))
    await asyncio.sleep(0)
    sending.cancel()
    header, received = await take(pair.far)
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert (header, received) == (b"h", body.tobytes())
    await _send_and_take(pair)


async def test_what_was_sent_before_a_close_is_delivered_then_the_peer_hears_of_the_end(pair: Pair) -> None:
    bodies = [random_body(size) for size in (10, MIB, 0)]
    for body in bodies:
        await send(pair.near, b"h", body)
    await pair.near.close()
    for body in bodies:
        assert (await take(pair.far))[1] == body.tobytes()
    with pytest.raises(LinkLost, match="near closed the Link"):
        await receive(pair.far)
    with pytest.raises(LinkLost):
        await send(pair.far, b"too late")
    assert not pair.far.is_open


async def test_a_closed_link_sends_and_receives_no_more(pair: Pair) -> None:
    pending = asyncio.ensure_future(pair.near.receive())
    await asyncio.sleep(0)
    await pair.near.close()
    await pair.near.close()
    for operation in (pending, pair.near.receive(), send(pair.near, b"h")):
        with pytest.raises(LinkLost, match="this side closed"):
            await operation


async def test_both_sides_may_close_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.transport.link.CLOSE_SECONDS", 60.0)  # neither waits for the other in vain
    await asyncio.wait_for(asyncio.gather(pair.near.close(), pair.far.close()), SECONDS)
    assert not pair.near.is_open
    assert not pair.far.is_open


async def test_closed_links_are_counted_no_more_on_either_side(pair: Pair) -> None:
    assert [transport.num_open_links() for transport in pair.transports] == [1, 1]
    await pair.near.close()
    with pytest.raises(LinkLost):
        await receive(pair.far)
    assert [transport.num_open_links() for transport in pair.transports] == [0, 0]


async def test_closing_a_transport_ends_what_waits_on_its_links(pair: Pair) -> None:
    pending = asyncio.ensure_future(pair.far.receive())
    await pair.transports[0].close()
    with pytest.raises(LinkLost):
        await asyncio.wait_for(pending, SECONDS)
    await pair.transports[0].close()
