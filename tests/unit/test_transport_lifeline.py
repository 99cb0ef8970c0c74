"""The TCP connection beside a UCX Link: packets until the handshake is over, then only its end counts."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from libs.transport.handshake import MAX_PACKET_BYTES
from libs.transport.port import HandshakeRefused, LinkLost
from libs.transport.ucx.bootstrap import Lifeline

SECONDS = 5.0


@dataclass
class Wired:
    """A Lifeline and the raw other end of its connection."""

    line: Lifeline
    raw: socket.socket

    async def say(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.raw, data)

    async def hear(self) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.raw, 1 << 20), SECONDS)

    async def receive(self) -> bytes:
        return await asyncio.wait_for(self.line.receive(), SECONDS)


@pytest.fixture
async def wired() -> AsyncIterator[Wired]:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, line = await loop.create_connection(Lifeline, *server.getsockname())
        raw, _ = server.accept()
    raw.setblocking(False)
    with raw:
        yield Wired(line, raw)
        line.close()


def framed(packet: bytes) -> bytes:
    return len(packet).to_bytes(4, "big") + packet


async def test_packets_come_whole_however_the_bytes_are_cut(wired: Wired) -> None:
    for byte in framed(b"first") + framed(b""):
        await wired.say(bytes([byte]))
    await wired.say(framed(b"third"))
    assert [await wired.receive() for _ in range(3)] == [b"first", b"", b"third"]


async def test_packets_are_sent_with_their_length(wired: Wired) -> None:
    wired.line.send(b"hello")
    assert await wired.hear() == framed(b"hello")


async def test_a_length_beyond_the_limit_is_refused_before_the_bytes_come(wired: Wired) -> None:
    await wired.say((MAX_PACKET_BYTES + 1).to_bytes(4, "big"))
    with pytest.raises(HandshakeRefused, match=f"a packet of {MAX_PACKET_BYTES + 1} bytes"):
        await wired.receive()


async def test_more_bytes_than_a_packet_may_have_end_the_connection(wired: Wired) -> None:
    await wired.say(bytes(MAX_PACKET_BYTES * 2))
    assert await wired.hear() == b""


async def test_a_peer_that_hangs_up_in_the_handshake_is_lost(wired: Wired) -> None:
    await wired.say(framed(b"only half a packet")[:10])
    wired.raw.close()
    with pytest.raises(LinkLost, match="hung up"):
        await wired.receive()


@pytest.mark.parametrize("word", [b"", b"x"])
async def test_after_the_handshake_the_end_is_told_once_and_so_is_any_word(wired: Wired, word: bytes) -> None:
    lost: list[bool] = []
    told = asyncio.Event()
    wired.line.watch(lambda: (lost.append(True), told.set()))
    if word:
        await wired.say(word)
    else:
        wired.raw.close()
    await asyncio.wait_for(told.wait(), SECONDS)
    wired.line.close()
    await asyncio.sleep(0)
    assert lost == [True]


async def test_a_peer_that_went_before_the_watch_is_told_too(wired: Wired) -> None:
    wired.raw.close()
    with pytest.raises(LinkLost):
        await wired.receive()
    lost: list[bool] = []
    wired.line.watch(lambda: lost.append(True))
    assert lost == [True]
