"""The faults that the in-memory twin makes on demand."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from memory_transport import MemoryNetwork, any_transport

from libs.transport.port import Link, LinkLost, LinkTimeout, Transport

SECONDS = 5.0


@dataclass
class Joined:
    """Two Links joined to each other on one network."""

    network: MemoryNetwork
    near: Link
    far: Link
    transports: tuple[Transport, Transport]


@pytest.fixture
async def joined() -> AsyncIterator[Joined]:
    network = MemoryNetwork()
    near, far = (any_transport("memory", name, b"secret", network=network) for name in ("near", "far"))
    listener = await far.listen("host")
    link = await near.connect(listener.address, timeout_seconds=SECONDS)
    yield Joined(network, link, await listener.accept(), (near, far))
    network.thaw()
    await near.close()
    await far.close()


async def test_dropped_links_fail_what_waits_on_them_at_both_ends(joined: Joined) -> None:
    pending = [asyncio.ensure_future(link.receive()) for link in (joined.near, joined.far)]
    await asyncio.sleep(0)
    joined.network.drop_links()
    for receive in pending:
        with pytest.raises(LinkLost, match="is gone"):
            await receive
    assert [transport.num_open_links() for transport in joined.transports] == [0, 0]


async def test_a_delay_holds_frames_back_and_keeps_their_order(joined: Joined) -> None:
    joined.network.delay_seconds = 0.5
    await joined.near.send(b"1", timeout_seconds=SECONDS)
    await joined.near.send(b"2", timeout_seconds=SECONDS)
    with pytest.raises(LinkTimeout):
        await joined.far.receive(timeout_seconds=0.01)
    assert [(await joined.far.receive(timeout_seconds=SECONDS)).header for _ in range(2)] == [b"1", b"2"]


async def test_a_frozen_network_delivers_after_the_thaw(joined: Joined) -> None:
    joined.network.freeze()
    await joined.near.send(b"held", timeout_seconds=SECONDS)
    with pytest.raises(LinkTimeout):
        await joined.far.receive(timeout_seconds=0.01)
    joined.network.thaw()
    assert (await joined.far.receive(timeout_seconds=SECONDS)).header == b"held"


async def test_a_frozen_peer_ends_a_send_at_its_deadline(joined: Joined) -> None:
    joined.network.freeze()
    with pytest.raises(LinkTimeout, match="got no credit"):  # noqa: PT012  # after the window is full
        for _ in range(1000):
            await joined.near.send(b"h", timeout_seconds=0.2)
    assert not joined.near.is_open


async def test_networks_are_apart(joined: Joined) -> None:
    stranger = any_transport("memory", "s", b"secret", network=MemoryNetwork())
    with pytest.raises(LinkLost, match="nobody"):
        await stranger.connect("memory://host:1", timeout_seconds=SECONDS)
