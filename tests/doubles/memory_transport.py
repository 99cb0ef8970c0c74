"""Links between transports of one process, in memory, with faults on demand."""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Literal

import numpy as np

from libs.transport import handshake
from libs.transport.acceptor import Acceptor
from libs.transport.choose import TransportKind, make_transport
from libs.transport.credits import Credit, LinkLimits
from libs.transport.handshake import Identity
from libs.transport.link import PeerLink
from libs.transport.memory import NO_BODY, Memory, as_memory, copy_to_host
from libs.transport.open_links import OpenLinks
from libs.transport.port import HandshakeRefused, LinkLost, LinkTimeout, ListenFailed, Transport
from libs.transport.wire import Sending

SCHEME = "memory://"

Kind = TransportKind | Literal["memory"]


class MemoryNetwork:
    """Joins the transports of one process and holds the faults to inject."""

    def __init__(self) -> None:
        self.listeners: dict[str, MemoryListener] = {}
        self.delay_seconds = 0.0
        self._is_frozen = False
        self._held: deque[Callable[[], None]] = deque()
        self._ports = count(1)
        self._wires: set[MemoryWire] = set()

    def free_port(self) -> int:
        """A port that nobody listens on."""
        return next(self._ports)

    def freeze(self) -> None:
        """Deliver nothing, as if every peer were stopped."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Deliver what was held, in order, and all that follows."""
        self._is_frozen = False
        while self._held:
            self._held.popleft()()

    def drop_links(self) -> None:
        """Lose every Link of this network, as if its peer were killed."""
        for wire in tuple(self._wires):
            wire.link.lose(LinkLost(f"{wire.link.peer} is gone"))

    def join(self, wire: "MemoryWire") -> None:
        """Make a wire known to `drop_links`."""
        self._wires.add(wire)

    def leave(self, wire: "MemoryWire") -> None:
        """The wire carries nothing any more."""
        self._wires.discard(wire)

    def deliver(self, event: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        """Let `event` happen at the other end: never at once, always in order."""
        if self._is_frozen:
            self._held.append(event)
        elif self.delay_seconds > 0:
            loop.call_later(self.delay_seconds, event)
        else:
            loop.call_soon(event)


class MemoryWire:
    """One direction of a Link: copies bodies and hands them to the other end."""

    def __init__(self, network: MemoryNetwork, link: PeerLink) -> None:
        self.network, self.link = network, link
        self.other: MemoryWire | None = None
        self._loop = asyncio.get_running_loop()
        network.join(self)

    def post(self, sending: Sending, credit: Credit) -> None:
        """See wire.Wire."""
        body = NO_BODY
        if sending.body.num_bytes:
            copied = np.empty(sending.body.num_bytes, dtype=np.uint8)
            copy_to_host(sending.body, copied)
            body = as_memory(copied)
        self._deliver(lambda link: _take(link, sending.header, body, credit))
        self._loop.call_soon(self.link.on_sent, sending)

    def tell(self, credit: Credit) -> None:
        """See wire.Wire."""
        self._deliver(lambda link: link.on_credit(credit))

    def post_close(self) -> None:
        """See wire.Wire."""
        self._deliver(lambda link: link.on_close())

    def abort(self) -> None:
        """See wire.Wire."""
        self.network.leave(self)
        self._deliver(lambda link: link.lose(LinkLost(f"{link.peer} is gone")))

    def _deliver(self, event: Callable[[PeerLink], None]) -> None:
        if self.other is not None:
            other = self.other.link
            self.network.deliver(lambda: event(other), self._loop)


def _take(link: PeerLink, header: bytes, body: Memory, credit: Credit) -> None:
    if link.on_arriving(body.num_bytes):
        link.on_credit(credit)
        link.on_frame(header, body, None)


class MemoryListener:
    """Accepts Links of one address of the network."""

    def __init__(self, transport: "MemoryTransport", address: str) -> None:
        self.transport, self.address = transport, address
        self.acceptor = Acceptor()

    async def accept(self) -> PeerLink:
        """See port.Listener."""
        return await self.acceptor.accept()

    async def close(self) -> None:
        """See port.Listener."""
        self.transport.network.listeners.pop(self.address, None)
        await self.acceptor.close()


class MemoryTransport:
    """A Transport (port.Transport) within one process."""

    def __init__(self, me: Identity, network: MemoryNetwork) -> None:
        self.me, self.network, self.links = me, network, OpenLinks()

    async def listen(self, host: str, port: int = 0) -> MemoryListener:
        """See port.Transport."""
        address = f"{SCHEME}{host}:{port or self.network.free_port()}"
        if address in self.network.listeners:
            raise ListenFailed(f"{address} is in use")
        listener = self.network.listeners[address] = MemoryListener(self, address)
        return listener

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> PeerLink:
        """See port.Transport."""
        if self.network.delay_seconds >= timeout_seconds:
            await asyncio.sleep(timeout_seconds)
            raise LinkTimeout(f"{address} did not answer within {timeout_seconds} s")
        await asyncio.sleep(self.network.delay_seconds)
        listener = self.network.listeners.get(address)
        if listener is None or not listener.acceptor.has_room():
            raise LinkLost(f"nobody accepts Links at {address}")
        try:
            return self._shake_hands(listener, expected_peer)
        except HandshakeRefused as error:
            listener.acceptor.refuse(str(error))
            raise

    def _shake_hands(self, listener: MemoryListener, expected_peer: str) -> PeerLink:
        me, them = self.me, listener.transport.me
        hello = handshake.client_hello(me)
        far_side, answer = handshake.answer_hello(them, hello)
        near_side = handshake.check_answer(me, hello, answer, expected_peer)
        near_side, proof = handshake.prove(me, near_side, b"")
        far_side, _ = handshake.check_proof(them, far_side, proof)
        handshake.check_welcome(me, near_side, handshake.welcome(them, far_side, b""))
        server = near_side.peer
        near = PeerLink(server.incarnation, me.limits, server.limits, self.links.discard)
        far = PeerLink(me.incarnation, them.limits, me.limits, listener.transport.links.discard)
        near_wire, far_wire = MemoryWire(self.network, near), MemoryWire(self.network, far)
        near_wire.other, far_wire.other = far_wire, near_wire
        near.attach(near_wire)
        far.attach(far_wire)
        self.links.add(near)
        listener.transport.links.add(far)
        listener.acceptor.offer(far)
        return near

    @property
    def spans_loops(self) -> bool:
        """See port.Transport."""
        return False

    def num_open_links(self) -> int:
        """See port.Transport."""
        return len(self.links)

    async def close(self) -> None:
        """See port.Transport."""
        for listener in tuple(self.network.listeners.values()):
            if listener.transport is self:
                await listener.close()
        await self.links.close()


def any_transport(
    kind: Kind,
    incarnation: str,
    secret: bytes,
    *,
    network: MemoryNetwork,
    limits: LinkLimits | None = None,
) -> Transport:
    """A transport of this kind. Those in memory are joined by `network`."""
    if kind != "memory":
        return make_transport(kind, incarnation, secret, limits=limits)
    me = Identity(kind=kind, incarnation=incarnation, secret=secret, limits=limits or LinkLimits())
    return MemoryTransport(me, network)
