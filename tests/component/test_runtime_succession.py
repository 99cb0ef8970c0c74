"""A service that ends in favour of another program: what others see, what goes before it, a real process."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from memory_broker import MemoryBroker
from memory_bus import MemoryBus
from nats_process import NatsServer

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.runtime.identity import new_identity
from libs.runtime.life import Stop
from libs.runtime.runtime import Runtime
from libs.runtime.service import live_on
from libs.runtime.settings import RuntimeSettings
from libs.runtime.successor import Successor

Run = Callable[[Coroutine[Any, Any, Any]], Any]

SUCCESSOR = Successor(module="services.decode_worker", flags=("--name=w",), title="a decode worker")
OTHER = Successor(module="services.router", flags=(), title="a router")


class Worker:
    """Notes what is done to it; drains as long as a test says."""

    def __init__(self, drain_seconds: float = 0.0) -> None:
        self.drain_seconds = drain_seconds
        self.done: list[str] = []
        self.seen: list[Presence] = []
        self.is_ready, self.is_draining = asyncio.Event(), asyncio.Event()
        self.runtime: Runtime

    async def open(self, runtime: Runtime) -> None:
        self.runtime = runtime
        runtime.on_presence_changed(self.look)

    def look(self) -> None:
        self.seen.append(self.runtime.presence)
        if self.runtime.presence.state is ServiceState.READY:
            self.is_ready.set()

    async def drain(self) -> None:
        self.done.append("drain")
        self.is_draining.set()
        await asyncio.sleep(self.drain_seconds)
        self.done.append("drained")

    async def close(self) -> None:
        self.done.append("close")

    def details(self) -> list[str]:
        return [p.detail for p in self.seen if p.state is ServiceState.DRAINING]


async def lived(
    worker: Worker, story: Callable[[Worker, Stop], Coroutine[Any, Any, None]], drain_timeout: float = 5.0
) -> Stop:
    """A life beside `story`, which begins when it is ready."""
    bus, stop = MemoryBus(MemoryBroker(clock=asyncio.get_running_loop().time)), Stop()
    settings = RuntimeSettings(drain_timeout_seconds=drain_timeout)
    identity = new_identity(ServiceKind.PREFILL_WORKER, "w")
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        life = group.create_task(live_on(bus, identity, settings, worker, stop, serves_probes=False))
        await worker.is_ready.wait()
        await story(worker, stop)
        assert await life == 0
    await bus.close()
    return stop


async def give_way(worker: Worker, stop: Stop) -> None:
    worker.runtime.end_as(SUCCESSOR)


def test_it_drains_and_closes_and_says_all_the_while_what_it_becomes(run_virtually: Run) -> None:
    async def story() -> None:
        worker = Worker(drain_seconds=1)
        stop = await lived(worker, give_way)
        assert stop.successor is SUCCESSOR
        assert worker.done == ["drain", "drained", "close"]
        assert set(worker.details()) == {"becoming a decode worker"}

    run_virtually(story())


def test_the_first_successor_stays(run_virtually: Run) -> None:
    async def twice(worker: Worker, stop: Stop) -> None:
        worker.runtime.end_as(SUCCESSOR)
        worker.runtime.end_as(OTHER)

    async def story() -> None:
        assert (await lived(Worker(), twice)).successor is SUCCESSOR

    run_virtually(story())


def test_a_drain_that_takes_too_long_does_not_keep_the_successor_away(run_virtually: Run) -> None:
    async def story() -> None:
        worker = Worker(drain_seconds=600)
        assert (await lived(worker, give_way)).successor is SUCCESSOR
        assert worker.done == ["drain", "close"]

    run_virtually(story())


def test_who_is_asked_to_end_meanwhile_ends_its_work_and_becomes_nothing(run_virtually: Run) -> None:
    async def ask(worker: Worker, stop: Stop) -> None:
        worker.runtime.end_as(SUCCESSOR)
        await worker.is_draining.wait()
        stop.asked.set()

    async def story() -> None:
        worker = Worker(drain_seconds=1)
        assert (await lived(worker, ask)).successor is None
        assert worker.done == ["drain", "drained", "close"]
        assert worker.details()[-1] == "closing"

    run_virtually(story())


def test_a_parent_that_dies_meanwhile_cuts_the_drain_short(run_virtually: Run) -> None:
    async def orphan(worker: Worker, stop: Stop) -> None:
        worker.runtime.end_as(SUCCESSOR)
        await worker.is_draining.wait()
        stop.skip_drain = True
        stop.asked.set()

    async def story() -> None:
        worker, loop = Worker(drain_seconds=600), asyncio.get_running_loop()
        assert (await lived(worker, orphan, drain_timeout=500)).successor is None
        assert worker.done == ["drain", "close"]
        assert loop.time() < 60

    run_virtually(story())


def test_who_was_asked_to_end_takes_no_successor(run_virtually: Run) -> None:
    async def late(worker: Worker, stop: Stop) -> None:
        stop.asked.set()
        await worker.is_draining.wait()
        worker.runtime.end_as(SUCCESSOR)

    async def story() -> None:
        assert (await lived(Worker(drain_seconds=1), late)).successor is None

    run_virtually(story())


def test_the_bound_on_its_end_begins_when_it_gives_way(run_virtually: Run) -> None:
    async def story() -> None:
        bounded: list[bool] = []

        async def give_way_in_bounds(worker: Worker, stop: Stop) -> None:
            stop.on_succession = lambda: bounded.append(worker.done == [])
            worker.runtime.end_as(SUCCESSOR)

        await lived(Worker(), give_way_in_bounds)
        assert bounded == [True]

    run_virtually(story())


PROGRAM = """
import asyncio, json, os, sys, socket
from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from libs.runtime.settings import RuntimeSettings
from libs.runtime.successor import Successor

MINE, OTHERS = {mine!r}, {others!r}
LEAKED = socket.socket()

class Example:
    def __init__(self, settings):
        self.settings = settings
    async def open(self, runtime):
        LEAKED.set_inheritable(True)  # as native libraries have them
        self.say("opened", pid=os.getpid(), incarnation=runtime.incarnation, told=os.environ.get("TOLD"),
                 address=runtime.presence.http_address, argv=sys.argv[1:],
                 descriptors=self.descriptors(),
                 inode=os.fstat(LEAKED.fileno()).st_ino)
        if MINE == "first":
            runtime.spawn("flip", self.flip(runtime))
    async def flip(self, runtime):
        flags = ("--nats-server=" + self.settings.nats_server, *sys.argv[3:])
        if not OTHERS: sys.executable = "/no/such/python"
        runtime.end_as(Successor(module=OTHERS, flags=flags, title="the second", environ={{"TOLD": "it"}}))
    async def drain(self):
        self.say("draining")
        if "slow" in self.settings.name: await asyncio.sleep(2)
    async def close(self): self.say("closed")
    def descriptors(self):
        numbers = (int(entry) for entry in os.listdir("/proc/self/fd"))
        return [os.fstat(n).st_ino for n in numbers if os.path.islink(f"/proc/self/fd/{{n}}")]
    def say(self, what, **more): print(json.dumps({{"who": MINE, "what": what, **more}}), flush=True)

if __name__ == "__main__":
    run_service(ServiceKind.ROUTER, RuntimeSettings, Example)
"""


@asynccontextmanager
async def first_of_two(
    folder: Path, *flags: str, others: str = "second"
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program `first`, which becomes `others` once it is ready; a broker is there."""
    (folder / "first.py").write_text(PROGRAM.format(mine="first", others=others))
    (folder / "second.py").write_text(PROGRAM.format(mine="second", others=""))
    root = str(Path(__file__).parents[2])
    server = NatsServer(folder / "nats")
    await server.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "first", "--nats-server", server.url, "--log-format", "json", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": root},
        cwd=folder,
    )
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await server.stop()


async def says(process: asyncio.subprocess.Process, who: str, what: str) -> dict[str, Any]:
    """The next that it says itself; log lines are passed over."""
    assert process.stdout is not None
    said: dict[str, Any] = {}
    while "who" not in said:
        line = await process.stdout.readline()
        assert line, f"ended without saying {what}"
        said = json.loads(line)
    assert (said["who"], said["what"]) == (who, what)
    return said


async def logs(process: asyncio.subprocess.Process, event: str) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if json.loads(line).get("event") == event:
            return
    raise AssertionError(f"ended without logging {event}")


async def test_the_process_becomes_the_other_program_with_all_of_the_first_closed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    async with first_of_two(tmp_path, "--probe-port", str(port)) as process:
        first = await says(process, "first", "opened")
        await says(process, "first", "draining")
        await says(process, "first", "closed")
        second = await says(process, "second", "opened")
        assert first["pid"] == second["pid"] == process.pid
        assert first["incarnation"] != second["incarnation"]
        assert first["address"] == second["address"] == f"http://127.0.0.1:{port}"
        assert (first["told"], second["told"]) == (None, "it")
        assert first["inode"] in first["descriptors"]
        assert first["inode"] not in second["descriptors"]
        assert len(second["descriptors"]) == len(first["descriptors"])
        process.send_signal(signal.SIGTERM)
        await says(process, "second", "draining")
        await says(process, "second", "closed")
        assert await process.wait() == 0


async def test_one_sigterm_while_it_gives_way_ends_it_in_order(tmp_path: Path) -> None:
    async with first_of_two(tmp_path, "--name", "slow") as process:
        await says(process, "first", "opened")
        await says(process, "first", "draining")
        process.send_signal(signal.SIGTERM)
        await says(process, "first", "closed")
        assert await process.wait() == 0


async def test_a_second_sigterm_ends_it_at_once(tmp_path: Path) -> None:
    async with first_of_two(tmp_path, "--name", "slow", "--drain-timeout-seconds", "60") as process:
        await says(process, "first", "opened")
        await says(process, "first", "draining")
        process.send_signal(signal.SIGTERM)
        await logs(process, "stop_asked")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM


async def test_a_replacement_that_fails_is_said_and_ends_the_process_with_1(tmp_path: Path) -> None:
    async with first_of_two(tmp_path, others="") as process:
        await logs(process, "program_not_replaced")
        assert await process.wait() == 1
