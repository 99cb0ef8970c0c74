"""What the mesh needs of a tensor transport. UCX, shared memory and in-memory pass one contract suite.

A Link joins two processes. It carries frames: a small opaque header (<= MAX_HEADER_BYTES) and a body of raw bytes,
each delivered whole, in order, once, or the Link is lost. Senders are held back by credits: a receiver that does not
consume stops its sender, never its own memory. An idle Link costs nothing.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MAX_HEADER_BYTES = 4096

Bytes = NDArray[np.uint8]


class LinkError(Exception):
    """The root: `LinkLost`, `LinkTimeout`, `HandshakeRefused`, `FrameTooLarge`."""


class LinkLost(LinkError):
    """The peer died, closed, or broke the protocol; everything that waits on this Link fails with this within 1 s."""


class LinkTimeout(LinkError):
    """This operation's deadline passed. The Link is lost with it: a half-sent frame cannot be taken back."""


class HandshakeRefused(LinkError):
    """Wrong secret, another incarnation than expected, or another protocol version."""


class FrameTooLarge(LinkError):
    """Header or body beyond the limits of the transport; nothing was sent."""


class Received(Protocol):
    """One frame, in memory that belongs to the Link's pool until `release`."""

    @property
    def header(self) -> bytes:
        """As sent."""
        ...

    @property
    def body(self) -> Bytes:
        """As sent; valid until `release`. Empty for a frame without a body."""
        ...

    def release(self) -> None:
        """Give the buffer back to the pool, and with it a credit to the sender. Idempotent."""
        ...


class Link(Protocol):
    """One end of a connection."""

    @property
    def peer(self) -> str:
        """Incarnation of the other side, proven in the handshake."""
        ...

    @property
    def is_open(self) -> bool:
        """False once lost or closed."""
        ...

    async def send(self, header: bytes, body: Bytes | None = None, *, timeout_seconds: float) -> None:
        """Send one frame; returns when `body` may be reused. Concurrent sends are queued in call order.
        Raises LinkLost, LinkTimeout, FrameTooLarge."""
        ...

    async def receive(self, *, timeout_seconds: float | None = None) -> Received:
        """The next frame. Raises LinkLost when none will come any more. A timeout here loses nothing."""
        ...

    async def close(self) -> None:
        """Frames already sent are delivered, then the peer's `receive` raises LinkLost. Idempotent."""
        ...


class Listener(Protocol):
    """Where peers connect to. `address` is a string to put into presence and messages."""

    @property
    def address(self) -> str:
        """Opaque to everybody but the same kind of transport: ucx://host:port, shm://..., memory://..."""
        ...

    async def accept(self) -> Link:
        """The next Link whose handshake succeeded."""
        ...

    async def close(self) -> None:
        """Stop accepting; accepted Links live on. Idempotent."""
        ...


class Transport(Protocol):
    """Makes Links. One per process; owns the worker, the buffer pool and the progress callback."""

    async def listen(self, host: str, port: int = 0) -> Listener:
        """Accept Links on this host; port 0 takes any free one."""
        ...

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> Link:
        """Connect and shake hands. `expected_peer` is the incarnation that must answer; empty accepts any.
        Raises LinkLost, LinkTimeout, HandshakeRefused."""
        ...

    def num_open_links(self) -> int:
        """For the gauge that must return to its baseline."""
        ...

    async def close(self) -> None:
        """Close all Links and listeners, then free the worker. Idempotent."""
        ...
