"""The bounded buffer before a client, and the door."""

import asyncio

import pytest

from services.gateway.api.errors import Failed, Overloaded, Unavailable
from services.gateway.api.serving import ConcurrencyLimit
from services.gateway.generation.stream import Outbox


async def test_what_waits_is_taken_together() -> None:
    outbox = Outbox(100)
    outbox.put(b"a")
    outbox.put(b"b")
    assert await outbox.take() == b"ab"
    outbox.close()
    assert await outbox.take() == b""


async def test_an_error_comes_after_all_that_was_put_before_it() -> None:
    outbox = Outbox(100)
    outbox.put(b"a")
    outbox.close(Failed("x"))
    outbox.put(b"too late")
    assert await outbox.take() == b"a"
    with pytest.raises(Failed):
        await outbox.take()


async def test_past_its_bound_it_overflows_and_takes_nothing_more() -> None:
    outbox = Outbox(3)
    outbox.put(b"abc")
    assert not outbox.overflowed.is_set()
    outbox.put(b"d")
    assert outbox.overflowed.is_set()
    assert await outbox.take() == b"abc"
    outbox.put(b"e")
    outbox.close()
    assert await outbox.take() == b""


async def test_reading_makes_room() -> None:
    outbox = Outbox(3)
    for _ in range(10):
        outbox.put(b"abc")
        assert await outbox.take() == b"abc"
    assert not outbox.overflowed.is_set()


async def test_a_reader_waits_for_the_next_piece() -> None:
    outbox = Outbox(10)
    reading = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not reading.done()
    outbox.put(b"x")
    assert await reading == b"x"


async def test_the_limit_refuses_beyond_its_limit_and_opens_again() -> None:
    limit = ConcurrencyLimit(1)
    with limit:
        with pytest.raises(Overloaded) as refused, limit:
            pass
        assert refused.value.retry_after_seconds
        assert limit.num_inside == 1
    with limit:
        assert limit.num_inside == 1


async def test_a_closed_limit_lets_nobody_in_and_tells_when_all_are_out() -> None:
    limit = ConcurrencyLimit(2)
    with limit:
        limit.close()
        waiting = asyncio.create_task(limit.wait_empty())
        with pytest.raises(Unavailable), limit:
            pass
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


async def test_errors_inside_leave_the_limit() -> None:
    limit = ConcurrencyLimit(1)
    with pytest.raises(ZeroDivisionError), limit:
        raise ZeroDivisionError
    assert limit.num_inside == 0
