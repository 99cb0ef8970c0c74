"""Whose silence counts for those who watch who is there."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.runtime.heartbeat import HEARTBEAT_SECONDS
from libs.runtime.roster import EXPIRY_SECONDS, Roster, RosterChange, watch_roster

Run = Callable[[Coroutine[Any, Any, None]], None]


def router(name: str) -> Presence:
    return Presence(kind=ServiceKind.ROUTER, name=name, incarnation=name, state=ServiceState.READY)


async def beat(bus: MemoryBus, presence: Presence) -> None:
    await bus.put_presence(presence.incarnation, msgspec.msgpack.encode(presence))


@asynccontextmanager
async def departures(
    bus: MemoryBus, roster: Roster, *, hears_itself: bool = False
) -> AsyncGenerator[asyncio.Queue[Presence]]:
    """Who departs from the roster, which is fed meanwhile; the bus is closed at the end."""
    departed: asyncio.Queue[Presence] = asyncio.Queue()

    def told(change: RosterChange) -> None:
        for presence in change.departed:
            departed.put_nowait(presence)

    watching = asyncio.create_task(watch_roster(bus, roster, told, hears_itself=hears_itself))
    yield departed
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await bus.close()


def test_a_process_that_falls_silent_departs_within_the_expiry(run_virtually: Run) -> None:
    async def story() -> None:
        clock = asyncio.get_running_loop().time
        broker = MemoryBroker(clock=clock)
        bus = MemoryBus(broker)
        async with departures(MemoryBus(broker), Roster()) as departed:
            silent = router("ab")
            await beat(bus, silent)
            await bus.put_presence("other", b"\xc1 no presence at all")
            begun = clock()
            assert await departed.get() == silent
            assert clock() - begun <= EXPIRY_SECONDS + 0.1
        await bus.close()

    run_virtually(story())


def test_while_own_heartbeats_do_not_come_back_nobody_departs(run_virtually: Run) -> None:
    """As with a broker that stands still, and takes what it is sent all the same."""

    async def story() -> None:
        clock = asyncio.get_running_loop().time
        bus, roster = MemoryBus(MemoryBroker(clock=clock)), Roster()
        async with departures(bus, roster, hears_itself=True) as departed:
            own, peer = router("own"), router("peer")
            await beat(bus, own)
            await beat(bus, peer)
            await asyncio.sleep(10 * EXPIRY_SECONDS)  # of virtual time
            assert {one.name for one in roster.all()} == {"own", "peer"}
            assert departed.empty()
            begun = clock()
            while departed.empty():
                await beat(bus, own)
                await asyncio.sleep(HEARTBEAT_SECONDS)
            assert departed.get_nowait() == peer, "one that is heard no more while others are has departed"
            assert clock() - begun <= EXPIRY_SECONDS + HEARTBEAT_SECONDS

    run_virtually(story())
