"""A service as a real process, with a real broker and real signals."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from nats_process import NatsServer

from libs.bus.messages.presence import Presence, ServiceState
from libs.bus.nats_bus import NatsBus
from libs.runtime.roster import Roster, RosterChange, watch_roster

PROGRAM = """
import asyncio, sys, time
from libs.bus.messages.presence import ServiceKind
from libs.runtime.service import run_service
from libs.runtime.settings import RuntimeSettings

class Example:
    def __init__(self, settings): pass
    async def open(self, runtime):
        if "loading" in sys.orig_argv[-1]: await asyncio.to_thread(time.sleep, 600)
        print("opened", flush=True)
    async def drain(self):
        print("draining", flush=True)
        if "slow" in sys.orig_argv[-1]: await asyncio.sleep(600)
    async def close(self): print("closed", flush=True)

run_service(ServiceKind.ROUTER, RuntimeSettings, Example)
"""


FREEZING_PROGRAM = PROGRAM.replace("import asyncio,", "import asyncio, gc,").replace(
    'print("draining", flush=True)', 'print("frozen", gc.get_freeze_count() > 10_000, flush=True)'
)


@asynccontextmanager
async def started(
    url: str, *flags: str, program: str = PROGRAM, environ: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "--nats-server", url, "--log-format", "json", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environ or {})},
    )
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def broker(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "nats")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def says(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdout is not None
    while (line := (await process.stdout.readline()).decode().strip()) != text:
        assert line, f"ended without saying {text!r}"


async def logs(process: asyncio.subprocess.Process, event: str) -> dict[str, object]:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        if (entry := json.loads(line))["event"] == event:
            return dict(entry)
    raise AssertionError(f"ended without logging {event!r}")


async def presence_with(url: str, state: ServiceState) -> Presence:
    """Wait until some process of the mesh is in this state."""
    bus, roster = await NatsBus.connect(url), Roster()
    found: asyncio.Future[Presence] = asyncio.get_running_loop().create_future()

    def told(change: RosterChange) -> None:
        for presence in (*change.arrived, *change.updated):
            if presence.state is state and not found.done():
                found.set_result(presence)

    watching = asyncio.create_task(watch_roster(bus, roster, told))
    try:
        return await found
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await bus.close()


async def test_it_serves_probes_is_seen_drains_at_sigterm_and_ends_with_0(tmp_path: Path) -> None:
    async with broker(tmp_path) as nats, started(nats.url, "--name", "router-7") as process:
        presence = await presence_with(nats.url, ServiceState.READY)
        assert (presence.name, presence.pid) == ("router-7", process.pid)
        async with httpx.AsyncClient(base_url=presence.http_address, trust_env=False) as client:
            assert (await client.get("/live")).status_code == 200
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()["name"]) == (200, "router-7")
            assert 'kvmesh_service_info{incarnation="' in (await client.get("/metrics")).text
            assert (await client.get("/nothing")).status_code == 404
        process.send_signal(signal.SIGTERM)
        for text in ("opened", "draining", "closed"):
            await says(process, text)
        assert await process.wait() == 0


async def test_a_ready_program_keeps_its_modules_out_of_the_garbage_collectors_way(tmp_path: Path) -> None:
    async with broker(tmp_path) as nats, started(nats.url, program=FREEZING_PROGRAM) as process:
        await presence_with(nats.url, ServiceState.READY)
        process.send_signal(signal.SIGTERM)
        await says(process, "frozen True")


async def test_a_draining_process_is_not_ready_and_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with broker(tmp_path) as nats, started(nats.url, "--name", "slow") as process:
        presence = await presence_with(nats.url, ServiceState.READY)
        process.send_signal(signal.SIGINT)
        await says(process, "draining")
        async with httpx.AsyncClient(base_url=presence.http_address, trust_env=False) as client:
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/live")).status_code == 200
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 128 + signal.SIGINT


async def test_a_broker_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    async with started(f"nats://127.0.0.1:{port}") as process:
        awaited = await logs(process, "broker_awaited")
        assert awaited["nats_server"] == f"nats://127.0.0.1:{port}"
        server = NatsServer(tmp_path / "nats", port=port)
        await server.start()
        try:
            await says(process, "opened")
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            await server.stop()


async def test_waiting_for_a_broker_can_be_ended(tmp_path: Path) -> None:
    async with started("nats://127.0.0.1:1") as process:
        await logs(process, "broker_awaited")
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_thread_that_still_loads_does_not_keep_a_process_that_was_asked_to_end(
    tmp_path: Path,
) -> None:
    async with broker(tmp_path) as nats, started(nats.url, "--name", "loading") as process:
        await presence_with(nats.url, ServiceState.STARTING)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--prot", "1"], "router: unknown flag --prot"), (["--nats-server", "what:is this"], "--nats-server")],
)
async def test_bad_settings_are_one_line_and_exit_2(flags: list[str], said: str) -> None:
    async with started("nats://127.0.0.1:1", *flags) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert said in stderr.decode()
        assert "Traceback" not in stderr.decode()


async def test_a_taken_probe_port_is_said_and_ends_with_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        async with broker(tmp_path) as nats, started(nats.url, "--probe-port", port) as process:
            entry = await logs(process, "probes_not_opened")
            assert port in str(entry["error"])
            assert await process.wait() == 1


async def test_who_was_left_by_its_parent_before_it_began_does_not_stay() -> None:
    async with started("nats://127.0.0.1:1", environ={"KVMESH_PARENT_PID": "1"}) as process:
        assert await process.wait() == 1
