"""Two Links joined to each other."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from memory_transport import MemoryNetwork, any_transport

from libs.transport.choose import TransportKind
from libs.transport.credits import LinkLimits
from libs.transport.memory import Bytes, Memory
from libs.transport.port import Link, Transport

SECONDS = 10.0
MIB = 1 << 20
LIMITS = LinkLimits(window_frames=8, window_bytes=4 * MIB, max_body_bytes=128 * MIB)
BODY_SIZES = (1, 64, 32 * 1024, 32 * 1024 + 1, 128 * 1024, 128 * 1024 + 1, 3 * MIB)
"""Both sides of where bodies stop travelling with their header: over shared memory 32 KiB, over UCX 128."""


@dataclass
class Pair:
    """Two Links joined to each other, and their transports."""

    near: Link
    far: Link
    transports: tuple[Transport, Transport]


@asynccontextmanager
async def linked_pair(kind: TransportKind) -> AsyncIterator[Pair]:
    network = MemoryNetwork()
    near = any_transport(kind, "near", b"secret", limits=LIMITS, network=network)
    far = any_transport(kind, "far", b"secret", limits=LIMITS, network=network)
    listener = await far.listen("127.0.0.1")
    near_link = await near.connect(listener.address, expected_peer="far", timeout_seconds=SECONDS)
    yield Pair(near_link, await listener.accept(), (near, far))
    await near.close()
    await far.close()


def random_body(num_bytes: int) -> Bytes:
    return np.frombuffer(os.urandom(num_bytes), dtype=np.uint8)


async def send(link: Link, header: bytes, body: Bytes | Memory | None = None) -> None:
    await link.send(header, body, timeout_seconds=SECONDS)
