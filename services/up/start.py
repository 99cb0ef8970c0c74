"""Starts what was prepared, and waits for its end."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from libs.bus.nats_server import BrokerNotStarted, nats_server_command
from libs.config.closed_stdout import EXIT_STDOUT_CLOSED
from libs.runtime.connect import connect_bus
from libs.runtime.signals import end_at_latest_after
from libs.runtime.state_dir import default_state_dir
from libs.telemetry.logs import configure_logs
from services.up.announce import cli_command, invitation, reachable_url, wait_gateway_ready
from services.up.display import Display, new_display
from services.up.mesh import Mesh, Program
from services.up.plan import BROKER, BROKER_STAGE, Child
from services.up.preflight import NotStartable, check_port
from services.up.prepare import Prepared
from services.up.watch import Watch

_LEAVE_SECONDS = 5.0
_BROKER_HOST = "127.0.0.1"


async def start(prepared: Prepared) -> int:
    """Returns the exit code: 0 as asked, 2 bad settings, 130 killed by a second Ctrl-C, 141 when unread."""
    unread = asyncio.Event()
    display = new_display(unread.set)
    with (_log_dir(prepared) / "up.log").open("w", encoding="utf-8") as log, prepared.lock:
        configure_logs("up", "up", "", log_format="json", stream=log)
        try:
            return await _run(prepared, display, unread)
        finally:
            display.close()


async def _run(prepared: Prepared, display: Display, unread: asyncio.Event) -> int:
    settings = prepared.settings
    programs = [_program(child) for child in prepared.children]
    nats_url = settings.nats_server
    if not nats_url:
        nats_url, broker = _plan_broker(prepared.state_dir / "nats")
        programs = [broker, *programs]
    workers = f"{settings.prefill} prefill, {settings.decode} decode"
    display.text(f"kvmesh {version('kvmesh')}: {settings.model}, {workers}; logs in {_log_dir(prepared)}")
    mesh = _new_mesh(prepared, display, programs, nats_url)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, mesh.ask_stop)
    async with asyncio.TaskGroup() as group:
        sides = [
            group.create_task(_accompany(prepared, mesh, display, nats_url), name="watch"),
            group.create_task(_stop_when(unread, mesh), name="unread"),
        ]
        exit_code = await mesh.run()
        exit_code = EXIT_STDOUT_CLOSED if unread.is_set() else exit_code
        display.close()
        # Everything has ended; a library that swallows this cancellation must not keep us.
        end_at_latest_after(_LEAVE_SECONDS, exit_code)
        for side in sides:
            side.cancel()
    return exit_code


def _plan_broker(store_dir: Path) -> tuple[str, Program]:
    """URL and program of the nats-server that the Python environment brings along. Port and store stay the
    same over its restarts. Raises NotStartable."""
    port = check_port(_BROKER_HOST, 0)
    try:
        command = nats_server_command(store_dir, host=_BROKER_HOST, port=port)
    except BrokerNotStarted as error:
        raise NotStartable(str(error)) from error
    return f"nats://{_BROKER_HOST}:{port}", Program(BROKER, command, BROKER_STAGE)


def _log_dir(prepared: Prepared) -> Path:
    return prepared.state_dir / "logs"


def _new_mesh(prepared: Prepared, display: Display, programs: Sequence[Program], nats_url: str) -> Mesh:
    return Mesh(
        programs,
        {**prepared.environ, "KVMESH_NATS_SERVER": nats_url},
        display,
        _log_dir(prepared),
        drain_timeout_seconds=prepared.settings.drain_timeout_seconds,
        stable_seconds=prepared.settings.stable_seconds,
    )


async def _stop_when(unread: asyncio.Event, mesh: Mesh) -> None:
    """Nobody reads what is said any more: as Ctrl-C once."""
    await unread.wait()
    mesh.ask_stop()


def _program(child: Child) -> Program:
    command = (sys.executable, "-m", f"services.{child.kind.value}", "--name", child.name, *child.flags)
    return Program(child.name, command, child.stage, child.environ)


def _invitation(prepared: Prepared, url: str) -> str:
    settings = prepared.settings
    is_found = settings.state_dir == (os.environ.get("KVMESH_STATE_DIR") or default_state_dir())
    return invitation(
        url,
        settings.model,
        needs_key=prepared.needs_key,
        command=cli_command(Path(sys.executable), Path.cwd(), shutil.which("kvmesh")),
        state_dir="" if is_found else settings.state_dir,
    )


async def _accompany(prepared: Prepared, mesh: Mesh, display: Display, nats_url: str) -> None:
    """Tell the person how the mesh comes up, and go on watching it."""
    settings = prepared.settings
    watch = Watch(mesh, display, [c.name for c in prepared.children])
    bus = await connect_bus(nats_url, "up", asyncio.Event())
    if bus is None:
        return
    display.line(BROKER, f"ready at {nats_url}", style="green")
    if not settings.nats_server:
        mesh.became_ready(BROKER)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch.run(bus), name="presence")
            await watch.all_ready.wait()
            url = reachable_url(settings.host, prepared.port)
            if await wait_gateway_ready(url):
                display.text("\n" + _invitation(prepared, url))
            else:
                display.line("gateway", f"does not become ready; ask {url}/health why", style="red")
    finally:
        await bus.close()
