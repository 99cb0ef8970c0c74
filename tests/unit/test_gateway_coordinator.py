"""What clients see of a coordinator that is away, slow or broken; and the watch over its loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from gateway_coordinator import Coordinator, seen
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.errors import (
    BusError,
    HandlerFailed,
    MessageTooLarge,
    NoResponders,
    NotConnected,
    Overloaded,
    RequestTimedOut,
    Undecodable,
)
from libs.bus.messages.migration import ExplainRounds, Rounds
from services.gateway.api.errors import ApiError
from services.gateway.mesh.coordinator import ANSWER_TIMEOUT_SECONDS, LOOK_SECONDS, LoopWatch, ask_coordinator

Virtually = Callable[[Coroutine[Any, Any, Any]], Any]


class FailingBus:
    def __init__(self, error: BusError) -> None:
        self._error = error

    async def request(self, message: Any, *, timeout_seconds: float) -> Any:
        del message, timeout_seconds
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NoResponders("x"), 503, "no_coordinator"),
        (NotConnected("the broker is away"), 503, "no_coordinator"),
        (Overloaded("x"), 503, "no_coordinator"),
        (RequestTimedOut("x"), 504, "coordinator_timeout"),
        (HandlerFailed("x"), 500, "internal_error"),
        (Undecodable("versions differ"), 500, "internal_error"),
        (MessageTooLarge("s", 2, 1), 500, "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BusError) else None,
)
async def test_each_failure_of_the_bus_is_one_for_clients(error: BusError, status: int, code: str) -> None:
    with pytest.raises(ApiError) as raised:
        await ask_coordinator(FailingBus(error), ExplainRounds())  # type: ignore[arg-type]  # it asks, and no more
    assert (raised.value.status, raised.value.code) == (status, code)
    assert (raised.value.retry_after_seconds is not None) == (status == 503)


def test_a_coordinator_that_never_answers_is_given_up_in_time(run_virtually: Virtually) -> None:
    async def scenario() -> float:
        broker = MemoryBroker()
        asking, answering = MemoryBus(broker), MemoryBus(broker)

        async def silent(_: ExplainRounds) -> Rounds:
            await asyncio.sleep(1000)
            return Rounds(leader="", is_automatic=True, rounds=())

        await answering.serve(ExplainRounds, silent)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(ApiError, match="within 10 seconds; try again"):
            await ask_coordinator(asking, ExplainRounds())
        took = asyncio.get_running_loop().time() - begun
        for bus in (asking, answering):
            await bus.close()
        return took

    assert run_virtually(scenario()) == pytest.approx(ANSWER_TIMEOUT_SECONDS)


def test_the_loop_is_watched_and_only_what_is_new_is_told(run_virtually: Virtually) -> None:
    async def scenario() -> list[int | None]:
        broker = MemoryBroker()
        bus, other = MemoryBus(broker), MemoryBus(broker)
        told: list[int | None] = []
        watch = LoopWatch(bus, lambda: told.append(watch.last.rounds[0].number if watch.last else None))
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(LOOK_SECONDS)
        coordinator = Coordinator(other, rounds=[seen(1)])
        await coordinator.open()
        await asyncio.sleep(3 * LOOK_SECONDS)
        coordinator.rounds = [seen(2)]
        await asyncio.sleep(2 * LOOK_SECONDS)
        await coordinator.leave()
        await asyncio.sleep(2 * LOOK_SECONDS)
        watching.cancel()
        await asyncio.wait({watching})
        for one in (bus, other):
            await one.close()
        return told

    assert run_virtually(scenario()) == [1, 2, None]
