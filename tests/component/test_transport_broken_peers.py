"""Peers that know the secret and then break the protocol lose their Link; nobody else does."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import pytest

from libs.transport.choose import TransportKind, make_transport
from libs.transport.credits import Credit, LinkLimits
from libs.transport.memory import NO_BODY, as_memory
from libs.transport.port import Link, LinkLost
from libs.transport.shm_wire import _PACKET
from libs.transport.shm_wire import Kind as ShmKind
from libs.transport.ucx.wire import _ENVELOPE
from libs.transport.ucx.wire import Kind as UcxKind

SECONDS = 10.0
LIMITS = LinkLimits(window_frames=4, window_bytes=1 << 20, max_body_bytes=4 << 20)
ENDS = dict[str, Link]


async def joined(kind: str) -> AsyncIterator[ENDS]:
    near, far = (make_transport(cast("TransportKind", kind), name, b"secret", limits=LIMITS) for name in "nf")
    listener = await far.listen("127.0.0.1")
    ends: ENDS = {}
    for name in ("broken", "sound"):
        ends[name] = await near.connect(listener.address, timeout_seconds=SECONDS)
        ends[f"far {name}"] = await listener.accept()
    yield ends
    await near.close()
    await far.close()


@pytest.fixture
async def shm() -> AsyncIterator[ENDS]:
    async for ends in joined("shm"):
        yield ends


@pytest.fixture
async def ucx() -> AsyncIterator[ENDS]:
    async for ends in joined("ucx"):
        yield ends


async def only_the_broken_link_is_lost(ends: ENDS, reason: str) -> None:
    with pytest.raises(LinkLost, match=reason):
        await asyncio.wait_for(ends["far broken"].receive(), SECONDS)
    with pytest.raises(LinkLost):
        await asyncio.wait_for(ends["broken"].receive(), SECONDS)
    await ends["sound"].send(b"well", np.ones(100_000, dtype=np.uint8), timeout_seconds=SECONDS)
    frame = await ends["far sound"].receive(timeout_seconds=SECONDS)
    assert frame.body.sum() == 100_000
    frame.release()


def packet(
    kind: int, segment_id: int = 0, segment_bytes: int = 0, body_bytes: int = 0, tail: bytes = b""
) -> bytes:
    return _PACKET.pack(kind, 0, 0, segment_id, segment_bytes, body_bytes) + tail


def unsealed_memory() -> int:
    descriptor = os.memfd_create("unsealed")
    os.ftruncate(descriptor, 4096)
    return descriptor


SHM_NONSENSE: dict[str, tuple[bytes, Callable[[], int]]] = {
    "too short": (b"\x00", lambda: -1),
    "unknown kind": (packet(99), lambda: -1),
    "a body longer than its packet": (packet(ShmKind.INLINE, body_bytes=100, tail=b"abc"), lambda: -1),
    "a header beyond the limit": (packet(ShmKind.INLINE, tail=bytes(5000)), lambda: -1),
    "a segment never sent": (packet(ShmKind.SEGMENT, segment_id=7, body_bytes=10), lambda: -1),
    "an unsealed segment": (packet(ShmKind.SEGMENT, 0, 4096, 10), unsealed_memory),
    "a socket as segment": (packet(ShmKind.SEGMENT, 0, 4096, 10), lambda: socket.socket().detach()),
    "a release of nothing": (packet(ShmKind.RELEASED, segment_id=3), lambda: -1),
}


@pytest.mark.parametrize("nonsense", SHM_NONSENSE)
async def test_nonsense_over_shared_memory_ends_the_link(shm: ENDS, nonsense: str) -> None:
    content, descriptor = SHM_NONSENSE[nonsense]
    private: Any = shm["broken"]
    private._wire._packets.send(content, descriptor())
    await only_the_broken_link_is_lost(shm, "n broke the protocol")


async def test_credit_for_what_was_never_sent_ends_the_link(shm: ENDS) -> None:
    private: Any = shm["broken"]
    private._wire.tell(Credit(5, 0))
    await only_the_broken_link_is_lost(shm, "released more than it was sent")


@pytest.mark.parametrize("num_bytes", [10, 300_000])
async def test_frames_beyond_the_credit_end_the_link(ucx: ENDS, num_bytes: int) -> None:
    private: Any = ucx["broken"]
    private._outgoing.can_send = lambda num_bytes: True
    body = np.ones(num_bytes, dtype=np.uint8)
    sends = [ucx["broken"].send(b"h", body, timeout_seconds=SECONDS) for _ in range(6)]
    outcomes = asyncio.gather(*sends, return_exceptions=True)
    num_received = 0
    with contextlib.suppress(LinkLost):
        while True:
            await asyncio.wait_for(ucx["far broken"].receive(), SECONDS)
            num_received += 1
    assert num_received <= 4
    await only_the_broken_link_is_lost(ucx, "beyond its credit")
    await outcomes


async def test_a_frame_number_that_comes_twice_ends_the_link(ucx: ENDS) -> None:
    private: Any = ucx["broken"]
    await ucx["broken"].send(b"first", timeout_seconds=SECONDS)
    private._wire._next_number = 0
    await ucx["broken"].send(b"again", timeout_seconds=SECONDS)
    assert (await ucx["far broken"].receive()).header == b"first"
    await only_the_broken_link_is_lost(ucx, "number 0 came twice")


@pytest.mark.parametrize("body_bytes", [0, 500_000])
async def test_messages_without_the_links_token_reach_nobody(ucx: ENDS, body_bytes: int) -> None:
    private: Any = ucx["sound"]
    worker = private._wire._worker
    body = as_memory(np.ones(body_bytes, dtype=np.uint8)) if body_bytes else NO_BODY
    ended = asyncio.Event()
    for envelope in (b"", b"short", bytes(3000), _ENVELOPE.pack(1, 0, UcxKind.FRAME, 0, 0) + b"header"):
        ended.clear()
        worker.send(envelope, body, body_bytes > 0, lambda status: ended.set())
        await asyncio.wait_for(ended.wait(), SECONDS)
    await ucx["sound"].send(b"mine", timeout_seconds=SECONDS)
    assert (await ucx["far sound"].receive(timeout_seconds=SECONDS)).header == b"mine"
    await ucx["broken"].close()
