"""What the contract tests of the bus share: messages, a broker of each kind, and ways to wait."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import msgspec
from memory_broker import MemoryBroker
from memory_bus import MemoryBus
from nats_process import NatsServer

from libs.bus.bus import Bus
from libs.bus.errors import BusError
from libs.bus.message import Message, PresenceEntry, Request
from libs.bus.nats_bus import NatsBus

T = TypeVar("T")

SOON_SECONDS = 15.0
"""Nothing here takes that long; a busy machine may."""

AT_ONCE_SECONDS = 1.0
TTL_SECONDS = 2.0
"""A busy machine takes a good part of a second for what a test does while an entry or a lease lasts."""


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
        self._broker = MemoryBroker(
            presence_ttl_seconds=TTL_SECONDS, lease_seconds=TTL_SECONDS, clock=lambda: self._now
        )
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
            await NatsBus.connect(
                self._server.url, name="test", presence_ttl_seconds=TTL_SECONDS, lease_seconds=TTL_SECONDS
            )
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
