"""What the mesh needs of a tensor transport. UCX, shared memory and in-memory pass one contract suite.

A Link joins two processes. It carries frames: a small opaque header (<= MAX_HEADER_BYTES) and a body of raw
bytes, each delivered whole, in order, once, or the Link is lost. Senders are held back by credits: a receiver
that does not consume stops its sender, never its own memory. An idle Link costs nothing.
"""

from collections.abc import Callable
from typing import Protocol

from libs.transport.memory import Bytes as Bytes
from libs.transport.memory import Memory

MAX_HEADER_BYTES = 4096


class LinkError(Exception):
    """The root: `LinkLost`, `LinkTimeout`, `HandshakeRefused`, `FrameTooLarge`, `ListenFailed`."""


class LinkLost(LinkError):
    """The peer died, closed, or broke the protocol; everything that waits on this Link fails with this within
    1 s."""


class LinkTimeout(LinkError):
    """This operation's deadline passed. With a send the Link is lost: a half-sent frame cannot be taken
    back."""


class HandshakeRefused(LinkError):
    """Wrong secret, another incarnation than expected, or another protocol version."""


class FrameTooLarge(LinkError):
    """Header or body beyond the limits of the transport; nothing was sent."""


class ListenFailed(LinkError):
    """The address is in use or not of this machine, or the transport cannot work here; says which."""


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
        """Give the buffer back to the pool, and with it a credit to the sender. Idempotent. `body` is empty
        after."""
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

    async def send(
        self, header: bytes, body: Bytes | Memory | None = None, *, timeout_seconds: float
    ) -> None:
        """Send one frame; returns when `body` may be reused. Concurrent sends are queued in call order.
        `Memory` takes what is no numpy array: `as_memory(tensor)`, host or device. A send cancelled while it
        still waits for credit never happened; one that is under way is first ended, within its deadline.
        Raises LinkLost, LinkTimeout, FrameTooLarge."""
        ...

    def post(
        self,
        header: bytes,
        body: Bytes | Memory | None,
        done: Callable[[LinkError | None], None],
        *,
        timeout_seconds: float,
    ) -> None:
        """`send` for who does not wait; for the loop's thread, also while the loop stands still.

        `done` hears once that `body` may be reused, or why it was not sent, perhaps before this returns. The
        Link is lost when no post has been taken for `timeout_seconds`. Raises LinkLost, FrameTooLarge; then
        `done` hears nothing."""
        ...

    def deliver(self, take: Callable[[Received], None], lost: Callable[[LinkLost], None]) -> None:
        """Instead of `receive`, from now on: `take` gets each frame in the turn of the loop in which it
        comes, first those that wait; where it raises the Link is lost. `lost` hears once why none will come
        any more."""
        ...

    async def receive(self, *, timeout_seconds: float | None = None) -> Received:
        """The next frame. Raises LinkLost when none will come any more; LinkTimeout, which here loses
        nothing."""
        ...

    async def close(self) -> None:
        """Frames already sent are delivered, then the peer's `receive` raises LinkLost. Idempotent."""
        ...


class Listener(Protocol):
    """Where peers connect to. `address` is a string to put into presence and messages."""

    @property
    def address(self) -> str:
        """Opaque to everybody but transports: ucx://host:port, shm://..., or both with a comma between."""
        ...

    async def accept(self) -> Link:
        """The next Link whose handshake succeeded."""
        ...

    async def close(self) -> None:
        """Stop accepting; accepted Links live on. Idempotent."""
        ...


def address_of(scheme: str, address: str) -> str:
    """The part of an address that is for this scheme; all of it where none is."""
    return next((part for part in address.split(",") if part.startswith(scheme)), address)


class Transport(Protocol):
    """Makes Links. One per process; owns the worker, the buffer pool and the progress callback."""

    async def listen(self, host: str, port: int = 0) -> Listener:
        """Accept Links on this host; port 0 takes any free one. Raises ListenFailed."""
        ...

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> Link:
        """Connect and shake hands. `expected_peer` is the incarnation that must answer; empty accepts any.
        Raises LinkLost, LinkTimeout, HandshakeRefused."""
        ...

    @property
    def spans_loops(self) -> bool:
        """Whether its Links lead to any event loop, also of other threads."""
        ...

    def num_open_links(self) -> int:
        """For the gauge that must return to its baseline."""
        ...

    async def close(self) -> None:
        """Close all Links and listeners, then free the worker. Idempotent."""
        ...
