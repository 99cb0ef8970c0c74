"""The event loop of a thread that mostly computes."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from libs.engine.thread_loop import ThreadLoop

SECONDS = 10.0


@pytest.fixture
def turned() -> Iterator[ThreadLoop]:
    turned = ThreadLoop()
    yield turned
    if not turned.loop.is_closed():
        turned.close()


def test_a_turn_runs_what_is_ready_and_does_not_wait(turned: ThreadLoop) -> None:
    ran: list[str] = []
    turned.loop.call_soon(ran.append, "soon")
    turned.loop.call_later(SECONDS, ran.append, "later")
    turned.turn()
    assert ran == ["soon"]


def test_a_turn_that_is_not_due_yet_does_nothing(turned: ThreadLoop) -> None:
    turned.turn()
    ran: list[int] = []
    turned.loop.call_soon(ran.append, 1)
    turned.turn_if_due()
    assert ran == []
    while not ran:
        turned.turn_if_due()


def test_a_sleep_ends_by_a_wake_of_another_thread(turned: ThreadLoop) -> None:
    waking = threading.Thread(target=turned.wake)
    began = time.monotonic()
    waking.start()
    turned.sleep(SECONDS)
    waking.join()
    assert time.monotonic() - began < SECONDS


def test_a_sleep_ends_by_a_wake_that_came_before_it_or_out_of_its_own_callbacks(turned: ThreadLoop) -> None:
    turned.wake()
    turned.sleep(None)
    turned.loop.call_later(0.001, turned.wake)
    turned.sleep(None)


def test_a_sleep_ends_when_its_time_is_over(turned: ThreadLoop) -> None:
    turned.sleep(0.001)
    turned.sleep(0.0)


def test_tasks_go_on_from_one_sleep_to_the_next(turned: ThreadLoop) -> None:
    async def count() -> int:
        for _ in range(3):
            await asyncio.sleep(0.001)
            turned.wake()
        return 3

    counting = turned.loop.create_task(count())
    while not counting.done():
        turned.sleep(SECONDS)
    assert counting.result() == 3


def test_a_close_cancels_what_is_left_and_later_wakes_are_ignored(turned: ThreadLoop) -> None:
    endless = turned.loop.create_task(asyncio.sleep(SECONDS))
    turned.turn()
    turned.close()
    assert endless.cancelled()
    turned.wake()


def test_what_is_to_be_done_at_the_end_is_done_before_tasks_are_cancelled_whoever_wakes_it(
    turned: ThreadLoop,
) -> None:
    ended: list[str] = []

    async def serve() -> None:
        try:
            await asyncio.sleep(SECONDS)
        finally:
            ended.append("served")
            turned.wake()
            await asyncio.sleep(0.001)
            ended.append("tidied")

    async def close() -> None:
        turned.wake()
        await asyncio.sleep(0.001)
        ended.append("closed")

    async def fail() -> None:
        raise ValueError("this one cannot be closed")

    turned.loop.create_task(serve())
    turned.at_end(fail)
    turned.at_end(close)
    turned.turn()
    turned.wake()
    turned.close()
    assert ended == ["closed", "served", "tidied"]
    assert turned.loop.is_closed()
