"""Requests that come right after the broker was away; virtual time, the bus in memory."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.generation import Place, Placed, Refused
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.request.outcome import RefusalReason
from libs.runtime.identity import new_identity
from libs.runtime.life import Stop
from libs.runtime.service import live_on
from services.router.service import RouterService
from services.router.settings import RouterSettings

Run = Callable[[Coroutine[Any, Any, Any]], Any]
GRACE_SECONDS = 5.0
PAIR = (("p", ServiceKind.PREFILL_WORKER), ("d", ServiceKind.DECODE_WORKER))


class Scene:
    """A router, who asks it, and a pair of workers that are only told of."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time
        self.broker = MemoryBroker(clock=self.clock)
        self.asker, self.workers = MemoryBus(self.broker), MemoryBus(self.broker)
        self.num_told = 0

    async def tell_pair(self) -> None:
        self.num_told += 1
        for name, kind in PAIR:
            presence = Presence(kind=kind, name=name, incarnation=name, state=ServiceState.READY)
            await self.workers.put_presence(name, msgspec.msgpack.encode(presence))
        await asyncio.sleep(0.01)
        load = WorkerLoad(num_blocks=100, block_size=16)
        for name, kind in PAIR:
            report = LoadReport(kind=kind, incarnation=name, sequence=self.num_told, load=load)
            await self.workers.publish(report)

    async def live_together(self, seconds: float) -> None:
        ends_at = self.clock() + seconds
        while self.clock() < ends_at:
            await self.tell_pair()
            await asyncio.sleep(0.25)

    async def ask(self) -> Placed | Refused:
        place = Place(
            request_id="r", num_tokens=15, max_new_tokens=4, deadline_unix_seconds=self.clock() + 60
        )
        return await self.asker.request(place, timeout_seconds=60)


@asynccontextmanager
async def routed() -> AsyncGenerator[Scene]:
    scene, stop = Scene(), Stop()
    settings = RouterSettings(no_workers_grace_seconds=GRACE_SECONDS)
    bus, identity = MemoryBus(scene.broker), new_identity(ServiceKind.ROUTER, "router-0")
    service = RouterService(settings, clock=scene.clock)
    living = asyncio.create_task(live_on(bus, identity, settings, service, stop, serves_probes=False))
    try:
        await scene.live_together(2)
        yield scene
    finally:
        stop.asked.set()
        await living
        for one in (bus, scene.asker, scene.workers):
            await one.close()


@pytest.mark.parametrize("outage_seconds", [4.0, 12.0, 60.0])
def test_a_request_that_comes_before_the_workers_are_heard_again_waits_for_them(
    run_virtually: Run, outage_seconds: float
) -> None:
    async def story() -> None:
        async with routed() as scene:
            scene.broker.stop()
            await asyncio.sleep(outage_seconds)
            scene.broker.start()
            asking = asyncio.create_task(scene.ask())
            await asyncio.sleep(GRACE_SECONDS / 2)
            assert not asking.done(), asking.result()
            await scene.tell_pair()
            assert await asking == Placed(prefill="p", decode="d")

    run_virtually(story())


def test_workers_that_do_not_come_back_after_it_are_waited_for_no_longer_than_ever(
    run_virtually: Run,
) -> None:
    async def story() -> None:
        async with routed() as scene:
            scene.broker.stop()
            await asyncio.sleep(12)
            scene.broker.start()
            asked_at = scene.clock()
            refused = await scene.ask()
            assert isinstance(refused, Refused)
            assert refused.reason is RefusalReason.NO_WORKERS
            assert scene.clock() - asked_at == pytest.approx(GRACE_SECONDS, abs=1.1)

    run_virtually(story())
