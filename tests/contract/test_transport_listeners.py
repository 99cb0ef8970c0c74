"""How Links come about, and who gets none, whatever carries them."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import product
from typing import cast

import pytest
from memory_transport import MemoryNetwork, any_transport

from libs.transport.acceptor import MAX_HANDSHAKES
from libs.transport.choose import TransportKind, make_transport
from libs.transport.port import (
    HandshakeRefused,
    Link,
    LinkLost,
    LinkTimeout,
    Listener,
    ListenFailed,
    Transport,
)

SECONDS = 10.0


@dataclass
class Mesh:
    """Makes transports of one kind, and closes them."""

    kind: TransportKind
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    transports: list[Transport] = field(default_factory=list)

    def transport(self, incarnation: str, secret: bytes = b"secret") -> Transport:
        transport = any_transport(self.kind, incarnation, secret, network=self.network)
        self.transports.append(transport)
        return transport


@pytest.fixture(params=["memory", "shm", "ucx", "auto"])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    made = Mesh(cast("TransportKind", request.param))
    yield made
    for transport in made.transports:
        await transport.close()


async def join(transport: Transport, listener: Listener) -> tuple[Link, Link]:
    link = await transport.connect(listener.address, timeout_seconds=SECONDS)
    return link, await listener.accept()


async def talk(near: Link, far: Link) -> None:
    for link, other in ((near, far), (far, near)):
        await link.send(b"hello", timeout_seconds=SECONDS)
        frame = await other.receive(timeout_seconds=SECONDS)
        assert frame.header == b"hello"
        frame.release()


async def refused(transport: Transport, address: str, expected_peer: str = "") -> str:
    with pytest.raises(HandshakeRefused) as refusal:
        await transport.connect(address, expected_peer=expected_peer, timeout_seconds=SECONDS)
    return str(refusal.value)


async def test_a_peer_with_another_secret_is_refused_and_a_right_one_is_not(mesh: Mesh) -> None:
    server, stranger, friend = mesh.transport("s"), mesh.transport("x", b"guess"), mesh.transport("f")
    listener = await server.listen("127.0.0.1")
    assert "secret" in await refused(stranger, listener.address)
    await talk(*await join(friend, listener))
    assert (stranger.num_open_links(), server.num_open_links()) == (0, 1)


async def test_another_incarnation_than_expected_is_refused(mesh: Mesh) -> None:
    server, client = mesh.transport("worker-2"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    reason = await refused(client, listener.address, expected_peer="worker-1")
    assert "expected worker-1" in reason
    assert "worker-2" in reason
    assert client.num_open_links() == 0


async def test_many_links_between_the_same_two_are_independent(mesh: Mesh) -> None:
    a, b = mesh.transport("a"), mesh.transport("b")
    at_a, at_b = await a.listen("127.0.0.1"), await b.listen("127.0.0.1")
    pairs = await asyncio.gather(*(join(a, at_b) if i % 2 else join(b, at_a) for i in range(6)))
    ends = [end for pair in pairs for end in pair]
    by_a = [end for end in ends if end.peer == "b"]
    assert len(by_a) == 6
    for survivor in range(1, 6):
        await pairs[survivor - 1][0].close()
        assert (a.num_open_links(), b.num_open_links()) == (6 - survivor, 6 - survivor)
        await _talk_somewhere(pairs[survivor:])


async def _talk_somewhere(pairs: list[tuple[Link, Link]]) -> None:
    for near, _ in pairs:
        await near.send(b"ping", timeout_seconds=SECONDS)
    frames = await asyncio.gather(*(far.receive(timeout_seconds=SECONDS) for _, far in pairs))
    assert [frame.header for frame in frames] == [b"ping"] * len(pairs)


async def test_links_come_and_go_and_the_gauge_returns_to_its_baseline(mesh: Mesh) -> None:
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    for _ in range(10):
        near, far = await join(client, listener)
        await talk(near, far)
        await near.close()
        await far.close()
    assert (client.num_open_links(), server.num_open_links()) == (0, 0)


async def test_a_transport_may_link_to_itself(mesh: Mesh) -> None:
    alone = mesh.transport("alone")
    listener = await alone.listen("127.0.0.1")
    near, far = await join(alone, listener)
    await talk(near, far)
    await near.close()
    assert alone.num_open_links() == 0


async def test_nobody_at_the_address_is_said_at_once(mesh: Mesh) -> None:
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    await listener.close()
    await listener.close()
    with pytest.raises(LinkLost):
        await client.connect(listener.address, timeout_seconds=SECONDS)
    with pytest.raises(LinkLost):
        await client.connect("nowhere", timeout_seconds=SECONDS)


async def test_links_outlive_their_listener(mesh: Mesh) -> None:
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    near, far = await join(client, listener)
    await listener.close()
    await talk(near, far)


async def test_closing_a_listener_ends_accept_and_the_links_that_nobody_took(mesh: Mesh) -> None:
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    untaken = await client.connect(listener.address, timeout_seconds=SECONDS)
    await listener.close()
    with pytest.raises(LinkLost):
        await untaken.receive(timeout_seconds=SECONDS)
    with pytest.raises(LinkLost, match="closed"):
        await listener.accept()
    assert server.num_open_links() == 0


async def test_an_address_in_use_is_said(mesh: Mesh) -> None:
    server = mesh.transport("s")
    port = await _listen_somewhere(server)
    with pytest.raises(ListenFailed):
        await server.listen("127.0.0.1", port)


async def _listen_somewhere(transport: Transport) -> int:
    """The port; one that was free a moment ago may have been taken since."""
    for _ in range(20):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        with contextlib.suppress(ListenFailed):
            await transport.listen("127.0.0.1", port)
            return port
    raise AssertionError("no port stayed free")


def stranger_to(address: str) -> socket.socket:
    """A plain connection to a listener; in-memory listeners have none."""
    if address.startswith("ucx://"):
        host, port = address.removeprefix("ucx://").split(":")
        return socket.create_connection((host, int(port)))
    if not address.startswith("shm://"):
        pytest.skip("strangers cannot reach an in-memory listener")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0kvmesh-" + address.rsplit("/", 1)[1])
    return connection


GARBAGE = (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 1000, bytes(40), os.urandom(60_000), b"\x00\x00\x00\x05hello")


async def test_garbage_at_the_listening_port_harms_nobody(mesh: Mesh) -> None:
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    near, far = await join(client, listener)
    for address, garbage in product(listener.address.split(","), GARBAGE):
        with stranger_to(address) as stranger:
            stranger.setblocking(False)
            stranger.send(garbage)
            await talk(near, far)
    await talk(*await join(client, listener))
    assert server.num_open_links() == 2


async def silent_strangers(address: str) -> list[socket.socket]:
    strangers: list[socket.socket] = []
    for _ in range(MAX_HANDSHAKES):
        strangers.append(stranger_to(address.split(",")[0]))
        await asyncio.sleep(0)
    return strangers


async def test_strangers_that_say_nothing_are_bounded_in_number(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.transport.acceptor.HANDSHAKE_SECONDS", 600.0)
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    strangers = await silent_strangers(listener.address)
    with pytest.raises(LinkLost, match="hung up"):
        await client.connect(listener.address, timeout_seconds=SECONDS)
    for stranger in strangers:
        stranger.close()


async def test_strangers_that_say_nothing_are_cut_off(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libs.transport.acceptor.HANDSHAKE_SECONDS", 0.3)
    server, client = mesh.transport("s"), mesh.transport("c")
    listener = await server.listen("127.0.0.1")
    loop = asyncio.get_running_loop()
    for stranger in await silent_strangers(listener.address):
        stranger.setblocking(False)
        await asyncio.wait_for(_until_hung_up(loop, stranger), SECONDS)
        stranger.close()
    await talk(*await join(client, listener))


async def _until_hung_up(loop: asyncio.AbstractEventLoop, stranger: socket.socket) -> None:
    while await loop.sock_recv(stranger, 1024):
        pass


async def test_a_listener_that_does_not_answer_runs_into_the_deadline(mesh: Mesh) -> None:
    client = mesh.transport("c")
    if mesh.kind == "memory":
        listener = await mesh.transport("s").listen("127.0.0.1")
        mesh.network.delay_seconds = 1.0
        address = listener.address
    elif mesh.kind == "ucx":
        mute = socket.create_server(("127.0.0.1", 0))
        address = f"ucx://127.0.0.1:{mute.getsockname()[1]}"
    else:
        template = await mesh.transport("s").listen("127.0.0.1")
        mute = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"mute-{os.getpid()}"  # the names of such sockets are the whole machine's
        mute.bind(f"\0kvmesh-{name}")
        mute.listen()
        address = f"{template.address.rsplit('/', 1)[0]}/{name}"
    with pytest.raises(LinkTimeout):
        await client.connect(address, timeout_seconds=0.1)
    assert client.num_open_links() == 0
    if mesh.kind != "memory":
        mute.close()


async def test_an_address_of_another_host_is_no_shared_memory_address() -> None:
    transport = make_transport("shm", "c", b"secret")
    assert "another host" in await refused(transport, "shm://0123456789abcdef/name")
    await transport.close()


@pytest.mark.parametrize(("incarnation", "secret"), [("", b"secret"), ("me", b"")])
def test_a_transport_without_a_name_or_secret_is_not_made(incarnation: str, secret: bytes) -> None:
    with pytest.raises(ValueError, match="secret"):
        make_transport("ucx", incarnation, secret)
