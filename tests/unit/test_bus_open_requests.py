"""Requests in flight."""

import asyncio

import pytest

from libs.bus.errors import NoResponders, NotConnected, RequestTimedOut
from libs.bus.open_requests import OpenRequests


@pytest.fixture
def requests() -> OpenRequests[str]:
    return OpenRequests[str]("inbox.")


async def ask(requests: OpenRequests[str], sent: list[str], timeout_seconds: float = 20.0) -> str:
    async def send(reply: str) -> None:
        sent.append(reply)

    return await requests.wait("no answer", timeout_seconds, send)


async def asked(
    requests: OpenRequests[str], num_requests: int
) -> tuple[list["asyncio.Task[str]"], list[str]]:
    sent: list[str] = []
    tasks = [asyncio.create_task(ask(requests, sent)) for _ in range(num_requests)]
    await asyncio.sleep(0)
    return tasks, sent


async def test_each_gets_its_own_answer_in_whatever_order_they_come(requests: OpenRequests[str]) -> None:
    tasks, sent = await asked(requests, 3)
    assert len(set(sent)) == len(requests) == 3
    for reply in reversed(sent):
        requests.answer(reply, f"to {reply}")
    assert await asyncio.gather(*tasks) == [f"to {reply}" for reply in sent]
    assert len(requests) == 0


async def test_one_fails_and_the_others_wait_on(requests: OpenRequests[str]) -> None:
    tasks, sent = await asked(requests, 2)
    requests.fail(sent[0], NoResponders("gone"))
    with pytest.raises(NoResponders, match="gone"):
        await tasks[0]
    requests.answer(sent[1], "here")
    assert await tasks[1] == "here"


async def test_all_fail_when_no_answer_can_come(requests: OpenRequests[str]) -> None:
    tasks, _ = await asked(requests, 2)
    requests.fail_all(NotConnected("lost"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [NotConnected, NotConnected]


async def test_a_second_answer_and_one_to_nobody_are_passed_over(requests: OpenRequests[str]) -> None:
    tasks, sent = await asked(requests, 1)
    requests.answer(sent[0], "first")
    requests.answer(sent[0], "second")
    requests.fail(sent[0], NoResponders("third"))
    requests.answer("inbox.unknown", "to nobody")
    assert await tasks[0] == "first"


async def test_a_request_times_out_and_is_forgotten(requests: OpenRequests[str]) -> None:
    with pytest.raises(RequestTimedOut, match=r"no answer within 0\.001 s"):
        await ask(requests, [], timeout_seconds=0.001)
    assert len(requests) == 0


async def test_a_request_that_could_not_be_sent_is_forgotten(requests: OpenRequests[str]) -> None:
    async def send(_: str) -> None:
        raise NotConnected("away")

    with pytest.raises(NotConnected):
        await requests.wait("no answer", 1.0, send)
    assert len(requests) == 0
