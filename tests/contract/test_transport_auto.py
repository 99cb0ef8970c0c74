"""Which way a Link goes: through shared memory where the peer can be reached so, over UCX elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.transport import shm
from libs.transport.auto import AutoTransport
from libs.transport.choose import TransportKind, make_transport
from libs.transport.port import HandshakeRefused, Listener, Transport, address_of

SECONDS = 10.0


class Mesh:
    def __init__(self) -> None:
        self.transports: list[Transport] = []

    def transport(self, kind: TransportKind, name: str, secret: bytes = b"secret") -> Transport:
        self.transports.append(made := make_transport(kind, name, secret))
        return made

    def auto(self, name: str, secret: bytes = b"secret") -> AutoTransport:
        made = self.transport("auto", name, secret)
        assert isinstance(made, AutoTransport)
        return made


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    made = Mesh()
    yield made
    for transport in made.transports:
        await transport.close()


async def talk(near: Transport, listener: Listener, address: str = "") -> None:
    link = await near.connect(address or listener.address, expected_peer="far", timeout_seconds=SECONDS)
    other = await listener.accept()
    for one, two in ((link, other), (other, link)):
        await one.send(b"hello", timeout_seconds=SECONDS)
        frame = await two.receive(timeout_seconds=SECONDS)
        assert frame.header == b"hello"
        frame.release()


def ways(transport: AutoTransport) -> tuple[int, int]:
    """Open Links through shared memory, and over UCX."""
    return transport.shm.num_open_links(), transport.ucx.num_open_links()


async def test_on_one_host_links_go_through_shared_memory(mesh: Mesh) -> None:
    near, far = mesh.auto("near"), mesh.auto("far")
    listener = await far.listen("127.0.0.1")
    await talk(near, listener)
    assert ways(near) == ways(far) == (1, 0)


async def test_links_to_another_host_go_over_ucx(mesh: Mesh) -> None:
    near, far = mesh.auto("near"), mesh.auto("far")
    listener = await far.listen("127.0.0.1")
    there = listener.address.replace(shm.host_id(), "another-host")
    await talk(near, listener, there)
    assert ways(near) == ways(far) == (0, 1)


async def test_a_peer_whose_socket_is_not_to_be_reached_is_reached_over_ucx(mesh: Mesh) -> None:
    """As in another network namespace that calls itself the same."""
    near, far = mesh.auto("near"), mesh.auto("far")
    listener = await far.listen("127.0.0.1")
    elsewhere = f"{address_of('ucx://', listener.address)},shm://{shm.host_id()}/nobody-listens"
    await talk(near, listener, elsewhere)
    assert ways(near) == ways(far) == (0, 1)


@pytest.mark.parametrize("who", ["near", "far"])
async def test_where_the_host_cannot_be_told_links_go_over_ucx(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    near, far = mesh.auto("near"), mesh.auto("far")
    if who == "far":
        monkeypatch.setattr(shm, "BOOT_ID", tmp_path / "hidden")
    listener = await far.listen("127.0.0.1")
    assert ("shm" in listener.address) is (who == "near")
    monkeypatch.setattr(shm, "BOOT_ID", tmp_path / "hidden")
    await talk(near, listener)
    assert ways(near) == ways(far) == (0, 1)


@pytest.mark.parametrize("kind", ["ucx", "shm"])
async def test_a_peer_that_knows_one_way_alone_is_met_on_it(mesh: Mesh, kind: TransportKind) -> None:
    near, far = mesh.transport(kind, "near"), mesh.auto("far")
    await talk(near, await far.listen("127.0.0.1"))
    assert ways(far) == ((1, 0) if kind == "shm" else (0, 1))
    far_alone, near_both = mesh.transport(kind, "far"), mesh.auto("near")
    await talk(near_both, await far_alone.listen("127.0.0.1"))
    assert ways(near_both) == ((1, 0) if kind == "shm" else (0, 1))


async def test_a_stranger_is_refused_without_a_try_the_other_way(mesh: Mesh) -> None:
    stranger, far = mesh.auto("near", b"another secret"), mesh.auto("far")
    listener = await far.listen("127.0.0.1")
    with pytest.raises(HandshakeRefused):
        await stranger.connect(listener.address, timeout_seconds=SECONDS)
    assert ways(stranger) == ways(far) == (0, 0)


async def test_a_closed_listener_accepts_neither_way(mesh: Mesh) -> None:
    far = mesh.auto("far")
    listener = await far.listen("127.0.0.1")
    accepting = asyncio.ensure_future(listener.accept())
    await asyncio.sleep(0)
    await listener.close()
    with pytest.raises(Exception, match="closed"):
        await accepting
    for kind in ("ucx", "shm"):
        with pytest.raises(Exception, match="cannot reach"):
            await mesh.transport(kind, kind).connect(listener.address, timeout_seconds=SECONDS)
