"""What a person is told of children that speak through presence; virtual time, the bus in memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.message import PresenceEntry
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.runtime.roster import EXPIRY_SECONDS
from services.up.watch import Watch

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass
class Processes:
    """Children by name with their process ids."""

    pids: dict[str, int]
    ready: list[str] = field(default_factory=list)
    listeners: list[Callable[[str, int], None]] = field(default_factory=list)

    def is_ours(self, name: str, pid: int) -> bool:
        return self.pids.get(name) == pid

    def age_seconds(self, name: str) -> float:
        return 1.5

    def became_ready(self, name: str) -> None:
        self.ready.append(name)

    def on_death(self, listener: Callable[[str, int], None]) -> None:
        self.listeners.append(listener)

    def die(self, name: str) -> None:
        pid = self.pids.pop(name)
        for listener in self.listeners:
            listener(name, pid)


@dataclass
class Said:
    lines: list[str] = field(default_factory=list)

    def line(self, name: str, said: str, *, style: str = "") -> None:
        self.lines.append(f"{name} {said}")

    def text(self, text: str) -> None:
        self.lines.append(text)

    def busy(self, name: str, detail: str) -> None:
        if detail:
            self.lines.append(f"{name} ... {detail}")

    def close(self) -> None: ...


class Scene:
    """Two children, the bus, and `up` watching."""

    def __init__(self) -> None:
        self.broker = MemoryBroker(clock=asyncio.get_running_loop().time)
        self.bus, self.up_bus = MemoryBus(self.broker), MemoryBus(self.broker)
        self.processes, self.said = Processes({"router": 1, "decode-0": 2}), Said()
        self.watch = Watch(self.processes, self.said, ["router", "decode-0"])
        self.watching = asyncio.create_task(self.watch.run(self.up_bus))

    @asynccontextmanager
    async def onlooker(self, incarnation: str) -> AsyncGenerator[AsyncIterator[PresenceEntry]]:
        """Another that watches presence, once it has heard of this one."""
        bus = MemoryBus(self.broker)
        async with bus.watch_presence() as entries:
            assert (await anext(entries)).key == incarnation
            yield entries
        await bus.close()

    async def tell(self, name: str, pid: int, state: ServiceState, detail: str = "") -> str:
        incarnation = f"{name}-{pid}"
        presence = Presence(
            kind=ServiceKind.ROUTER, name=name, incarnation=incarnation, state=state, detail=detail, pid=pid
        )
        await self.bus.put_presence(incarnation, msgspec.msgpack.encode(presence))
        await asyncio.sleep(0.01)
        return incarnation

    async def close(self) -> None:
        self.watching.cancel()
        await asyncio.gather(self.watching, return_exceptions=True)
        for bus in (self.bus, self.up_bus):
            await bus.close()


def test_progress_then_one_line_each_then_all_are_ready(run_virtually: Run) -> None:
    async def story() -> None:
        scene = Scene()
        await scene.tell("router", 1, ServiceState.STARTING)
        await scene.tell("router", 1, ServiceState.READY)
        await scene.tell("decode-0", 2, ServiceState.STARTING, "loading weights 40%")
        assert not scene.watch.all_ready.is_set()
        await scene.tell("decode-0", 2, ServiceState.READY)
        await scene.tell("decode-0", 2, ServiceState.READY, "a detail")
        assert scene.watch.all_ready.is_set()
        assert scene.said.lines == [
            "router ... starting",
            "router ready after 1.5 s",
            "decode-0 ... loading weights 40%",
            "decode-0 ready after 1.5 s",
        ]
        assert scene.processes.ready == ["router", "decode-0"]
        await scene.close()

    run_virtually(story())


def test_strangers_on_the_same_broker_are_not_ours(run_virtually: Run) -> None:
    async def story() -> None:
        scene = Scene()
        await scene.tell("router", 99, ServiceState.READY)
        await scene.tell("prefill-0", 3, ServiceState.READY)
        assert scene.said.lines == []
        await scene.close()

    run_virtually(story())


def test_the_dead_are_struck_off_for_everybody_at_once_and_announced_anew_when_back(
    run_virtually: Run,
) -> None:
    async def story() -> None:
        scene = Scene()
        incarnation = await scene.tell("decode-0", 2, ServiceState.READY)
        async with scene.onlooker(incarnation) as entries:
            died = asyncio.get_running_loop().time()
            scene.processes.die("decode-0")
            gone = await anext(entries)
            assert (gone.key, gone.value) == (incarnation, None)
            assert asyncio.get_running_loop().time() - died < EXPIRY_SECONDS / 10
        scene.processes.pids["decode-0"] = 4
        await scene.tell("decode-0", 4, ServiceState.READY)
        assert scene.said.lines == ["decode-0 ready after 1.5 s"] * 2
        await scene.close()

    run_virtually(story())


def test_a_broker_that_stands_still_makes_nobody_gone_and_who_dies_meanwhile_is_struck_off(
    run_virtually: Run,
) -> None:
    async def story() -> None:
        scene = Scene()
        incarnation = await scene.tell("decode-0", 2, ServiceState.READY)
        async with scene.onlooker(incarnation) as entries:
            await asyncio.sleep(10 * EXPIRY_SECONDS)  # of virtual time, in which nothing is heard of anybody
            assert scene.said.lines == ["decode-0 ready after 1.5 s"]
            scene.processes.die("decode-0")
            gone = await anext(entries)
            assert (gone.key, gone.value) == (incarnation, None)
        assert scene.said.lines == ["decode-0 ready after 1.5 s"]
        await scene.close()

    run_virtually(story())


def test_a_death_while_the_broker_is_away_is_no_error(run_virtually: Run) -> None:
    async def story() -> None:
        scene = Scene()
        await scene.tell("decode-0", 2, ServiceState.READY)
        scene.broker.stop()
        scene.processes.die("decode-0")
        await asyncio.sleep(1)
        assert not scene.watching.done()
        scene.broker.start()
        await scene.close()

    run_virtually(story())
