"""Links between processes of one host through shared memory (port.Transport). Linux only."""

import asyncio
import hashlib
import os
import secrets
from pathlib import Path

from libs.transport.acceptor import Acceptor, Prepared, connect_line
from libs.transport.handshake import Identity, Side
from libs.transport.link import PeerLink
from libs.transport.open_links import OpenLinks
from libs.transport.packets import PacketServer, PacketSocket, connect_packets
from libs.transport.port import HandshakeRefused, LinkLost, LinkTimeout, ListenFailed, address_of
from libs.transport.shm_wire import ShmWire

SCHEME = "shm://"


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Equal for processes that can share memory this way: same kernel, same network namespace (abstract
    sockets). Raises OSError where neither can be told."""
    boot = BOOT_ID.read_text()
    namespace = os.readlink("/proc/self/ns/net")
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:16]


def shares_memory(address: str) -> bool:
    """Whether a listener's address is one of this host."""
    try:
        return address_of(SCHEME, address).startswith(f"{SCHEME}{host_id()}/")
    except OSError:
        return False


class ShmListener:
    """Accepts Links at one name (port.Listener)."""

    def __init__(self, transport: "ShmTransport", name: str, acceptor: Acceptor) -> None:
        """Raises ListenFailed."""
        self.acceptor, self._transport = acceptor, transport
        try:
            self.address = f"{SCHEME}{host_id()}/{name}"
            self._server = PacketServer(_socket_name(name), self._handshake)
        except OSError as error:
            raise ListenFailed(f"cannot listen at {SCHEME}.../{name}: {error}") from error

    def _handshake(self, packets: PacketSocket) -> None:
        self.acceptor.shake_hands(
            self._transport.me, packets, lambda side: self._transport.prepare(side, packets)
        )

    async def accept(self) -> PeerLink:
        """See port.Listener."""
        return await self.acceptor.accept()

    async def close(self) -> None:
        """See port.Listener."""
        self._server.close()
        await self.acceptor.close()


class ShmTransport:
    """Makes Links through shared memory. `cap_bytes` bounds the idle segments of each Link and direction."""

    def __init__(self, me: Identity, cap_bytes: int) -> None:
        self.me, self.links = me, OpenLinks()
        self._cap_bytes = cap_bytes
        self._listeners: set[ShmListener] = set()

    async def listen(self, host: str, port: int = 0, acceptor: Acceptor | None = None) -> ShmListener:
        """See port.Transport. `host` plays no part; the same `port` gives the same address. Links wait in
        `acceptor`."""
        listener = ShmListener(self, str(port) if port else secrets.token_hex(8), acceptor or Acceptor())
        self._listeners.add(listener)
        return listener

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> PeerLink:
        """See port.Transport. Raises HandshakeRefused for an address of another host."""
        address = address_of(SCHEME, address)
        _, _, name = address.removeprefix(SCHEME).partition("/")
        if not address.startswith(SCHEME) or not name:
            raise LinkLost(f"{address!r} is no shared-memory address; expected {SCHEME}HOST/NAME")
        if not shares_memory(address):
            raise HandshakeRefused(
                f"{address} is on another host or in another network namespace; use UCX for it"
            )
        try:
            async with asyncio.timeout(timeout_seconds):
                packets = await connect_packets(_socket_name(name))
                return await connect_line(
                    self.me, packets, expected_peer, lambda side: self.prepare(side, packets)
                )
        except TimeoutError:
            raise LinkTimeout(f"{address} did not answer within {timeout_seconds} s") from None
        except OSError as error:
            raise LinkLost(f"cannot reach {address}: {error}") from error

    def prepare(self, side: Side, packets: PacketSocket) -> Prepared:
        """A Link over a line whose peer is proven."""
        link = PeerLink(side.peer.incarnation, self.me.limits, side.peer.limits, self.links.discard)
        wire = ShmWire(link, packets, min(self._cap_bytes, side.peer.limits.window_bytes))
        link.attach(wire)
        self.links.add(link)

        def join(_: bytes) -> None:
            packets.watch(wire.on_packet, lambda: link.lose(LinkLost(f"{link.peer} is gone")))

        return Prepared(link, b"", join)

    @property
    def spans_loops(self) -> bool:
        """See port.Transport."""
        return True

    def num_open_links(self) -> int:
        """See port.Transport."""
        return len(self.links)

    async def close(self) -> None:
        """See port.Transport."""
        while self._listeners:
            await self._listeners.pop().close()
        await self.links.close()


def _socket_name(name: str) -> str:
    return f"kvmesh-{name}"
