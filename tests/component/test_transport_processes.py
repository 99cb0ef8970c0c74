"""Links to a real second process that dies, stops, or comes back."""

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from libs.transport.choose import TransportKind, make_transport
from libs.transport.credits import LinkLimits
from libs.transport.port import HandshakeRefused, Link, LinkLost, LinkTimeout, Transport

SECONDS = 20.0
MIB = 1 << 20
LIMITS = LinkLimits(window_bytes=256 * MIB)

_PEER = """
import asyncio, sys
from libs.transport.choose import make_transport
from libs.transport.credits import LinkLimits
from libs.transport.port import LinkLost

kind, incarnation, port, manner, window_mib = sys.argv[1:]

async def echo(link):
    try:
        while True:
            frame = await link.receive()
            await link.send(frame.header, frame.body, timeout_seconds=20)
            frame.release()
    except LinkLost:
        pass

async def main():
    limits = LinkLimits(window_bytes=int(window_mib) << 20)
    transport = make_transport(kind, incarnation, b"secret", limits=limits)
    listener = await transport.listen("127.0.0.1", int(port))
    print(listener.address, flush=True)
    links = []
    async with asyncio.TaskGroup() as group:
        while True:
            links.append(await listener.accept())
            if manner == "echo":
                group.create_task(echo(links[-1]))

asyncio.run(main())
"""


@dataclass
class Peers:
    """Starts second processes; ends those that the test leaves behind."""

    kind: TransportKind
    running: list[asyncio.subprocess.Process]

    async def start(
        self, incarnation: str, port: int = 0, manner: str = "echo", window_mib: int = 256
    ) -> tuple[asyncio.subprocess.Process, str]:
        arguments = (self.kind, incarnation, str(port), manner, str(window_mib))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PEER, *arguments, stdout=asyncio.subprocess.PIPE
        )
        self.running.append(process)
        assert process.stdout is not None
        return process, (await process.stdout.readline()).decode().strip()


@pytest.fixture(params=["shm", "ucx", "auto"])
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Peers]:
    made = Peers(cast("TransportKind", request.param), [])
    yield made
    for process in made.running:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def transport(peers: Peers) -> AsyncIterator[Transport]:
    made = make_transport(peers.kind, "test", b"secret", limits=LIMITS)
    yield made
    await made.close()


async def echoed(link: Link, header: bytes, num_bytes: int = 100) -> None:
    body = np.frombuffer(os.urandom(num_bytes), dtype=np.uint8)
    await link.send(header, body, timeout_seconds=SECONDS)
    frame = await link.receive(timeout_seconds=SECONDS)
    assert frame.header == header
    assert np.array_equal(frame.body, body)
    frame.release()


async def lost_within(seconds: float, *waiting: Awaitable[object]) -> None:
    begun = time.monotonic()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), SECONDS)
    assert [type(outcome) for outcome in outcomes] == [LinkLost] * len(waiting)
    assert time.monotonic() - begun < seconds


def num_shared_segments() -> int:
    """Mapped here. They have no name in any file system: the kernel frees one with its last mapping."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvmesh")


async def test_kill_9_fails_every_pending_receive_within_a_second(peers: Peers, transport: Transport) -> None:
    process, address = await peers.start("peer")
    links = [await transport.connect(address, timeout_seconds=SECONDS) for _ in range(2)]
    for link in links:
        await echoed(link, b"alive", 2 * MIB)
    assert (num_shared_segments() > 0) is (peers.kind != "ucx")
    pending = [asyncio.ensure_future(link.receive()) for link in links for _ in range(3)]
    await asyncio.sleep(0)
    process.send_signal(signal.SIGKILL)
    await lost_within(1.0, *pending)
    assert transport.num_open_links() == 0
    assert num_shared_segments() == 0, "memory of a dead peer is kept"
    with pytest.raises(LinkLost):
        await links[0].send(b"h", timeout_seconds=SECONDS)


async def test_kill_9_in_the_middle_of_sends_fails_them_within_a_second(
    peers: Peers, transport: Transport
) -> None:
    process, address = await peers.start("peer", manner="deaf")
    link = await transport.connect(address, timeout_seconds=SECONDS)
    body = np.ones(60 * MIB, dtype=np.uint8)
    await link.send(b"taken", body, timeout_seconds=SECONDS)
    process.send_signal(signal.SIGSTOP)  # so that the sends are certainly under way
    sends = [asyncio.ensure_future(link.send(b"h", body, timeout_seconds=SECONDS)) for _ in range(6)]
    _, pending = await asyncio.wait(sends, timeout=0.5)
    beyond_window = sends[3:]
    assert pending.issuperset(beyond_window)
    process.send_signal(signal.SIGKILL)
    await lost_within(1.0, *beyond_window, link.receive())
    within_window = await asyncio.gather(*sends[:3], return_exceptions=True)
    assert {type(outcome) for outcome in within_window} <= {type(None), LinkLost}
    assert transport.num_open_links() == 0


async def test_a_stopped_peer_ends_a_send_at_its_own_deadline_and_others_live_on(
    peers: Peers, transport: Transport
) -> None:
    process, address = await peers.start("stopped", manner="deaf")
    _, other_address = await peers.start("lively")
    link = await transport.connect(address, timeout_seconds=SECONDS)
    other = await transport.connect(other_address, timeout_seconds=SECONDS)
    process.send_signal(signal.SIGSTOP)
    body = np.ones(100 * MIB, dtype=np.uint8)
    receiving = asyncio.ensure_future(link.receive())
    begun = time.monotonic()
    with pytest.raises(LinkTimeout):  # noqa: PT012  # how many fit into the peer's window depends on the transport
        for _ in range(4):
            await link.send(b"h", body, timeout_seconds=0.5)
    assert time.monotonic() - begun < 5.0
    await lost_within(1.0, receiving)
    await echoed(other, b"unharmed", 3 * MIB)
    process.send_signal(signal.SIGCONT)
    renewed = await transport.connect(address, timeout_seconds=SECONDS)
    await renewed.send(b"again", body, timeout_seconds=SECONDS)
    await echoed(other, b"still unharmed", 3 * MIB)


async def test_a_restarted_peer_on_the_same_address_is_a_new_peer(peers: Peers, transport: Transport) -> None:
    port = _free_port()
    first, address = await peers.start("first", port)
    link = await transport.connect(address, expected_peer="first", timeout_seconds=SECONDS)
    await echoed(link, b"first life", 2 * MIB)
    first.send_signal(signal.SIGKILL)
    await lost_within(5.0, link.receive())
    await first.wait()
    _, same_address = await peers.start("second", port)
    assert same_address == address
    with pytest.raises(HandshakeRefused, match="expected first"):
        await transport.connect(address, expected_peer="first", timeout_seconds=SECONDS)
    renewed = await transport.connect(address, expected_peer="second", timeout_seconds=SECONDS)
    await echoed(renewed, b"second life", 2 * MIB)
    assert transport.num_open_links() == 1


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def test_a_link_with_a_receive_pending_costs_no_cpu(peers: Peers, transport: Transport) -> None:
    process, address = await peers.start("peer")
    link = await transport.connect(address, timeout_seconds=SECONDS)
    await echoed(link, b"warm", MIB)
    pending = asyncio.ensure_future(link.receive())
    both = [psutil.Process(), psutil.Process(process.pid)]
    spans: list[float] = []
    while len(spans) < 4 and not any(spent <= 0.03 for spent in spans):  # 1 % and the clock's resolution
        before = [sum(each.cpu_times()[:2]) for each in both]
        await asyncio.sleep(1.5)  # a span that is measured; other threads of this process may work in some
        spans.append(max(sum(each.cpu_times()[:2]) - b for each, b in zip(both, before, strict=True)))
    assert min(spans) <= 0.03
    pending.cancel()


async def test_links_that_come_and_go_leave_no_descriptors_and_no_memory_behind(
    peers: Peers, transport: Transport
) -> None:
    _, address = await peers.start("peer")
    this = psutil.Process()

    async def come_and_go(num_times: int) -> tuple[int, int]:
        for _ in range(num_times):
            link = await transport.connect(address, timeout_seconds=SECONDS)
            await echoed(link, b"h", MIB)
            await link.close()
        return this.num_fds(), this.memory_info().rss

    await come_and_go(5)
    fds, rss = await come_and_go(5)
    fds_after, rss_after = await come_and_go(40)
    assert fds_after <= fds + 8  # a worker that is being freed may still hold its own
    assert rss_after <= rss + 16 * MIB


async def test_what_a_peer_does_not_consume_stays_within_its_window(
    peers: Peers, transport: Transport
) -> None:
    process, address = await peers.start("deaf", manner="deaf", window_mib=8)
    link = await transport.connect(address, timeout_seconds=SECONDS)
    body = np.ones(MIB, dtype=np.uint8)
    peer, this = psutil.Process(process.pid), psutil.Process()
    before = peer.memory_info().rss + this.memory_info().rss
    num_sent = 0
    with pytest.raises(LinkTimeout):  # noqa: PT012  # the loop counts what was taken
        while True:
            await link.send(b"h", body, timeout_seconds=0.5)
            num_sent += 1
    assert num_sent == 8
    assert peer.memory_info().rss + this.memory_info().rss - before <= 24 * MIB
