"""The TCP connection beside a UCX Link: shakes hands, so that strangers never reach UCX, then stays as its
lifeline: the kernel closes it when either process dies, whatever UCX runs over."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from libs.transport.handshake import MAX_PACKET_BYTES
from libs.transport.port import HandshakeRefused, LinkLost, address_of

SCHEME = "ucx"
KEEPALIVE_IDLE_SECONDS = 2
KEEPALIVE_INTERVAL_SECONDS = 1
KEEPALIVE_PROBES = 3


def format_address(host: str, port: int) -> str:
    """ucx://host:port; a wildcard host is told as this machine's name."""
    if host in ("", "0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{SCHEME}://[{host}]:{port}" if ":" in host else f"{SCHEME}://{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Host and port. Raises LinkLost for anything else."""
    address = address_of(f"{SCHEME}://", address)
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None or not address.startswith(f"{SCHEME}://"):
        raise LinkLost(f"{address!r} is no UCX address; expected {SCHEME}://host:port")
    return host, port


class Lifeline(asyncio.Protocol):
    """Length-prefixed packets until the handshake is over, then silence until the end."""

    def __init__(self, on_connected: "Callable[[Lifeline], None] | None" = None) -> None:
        self._on_connected = on_connected
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self.on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # Not by isinstance: uvloop's transports behave as asyncio.Transport without deriving from it.
        self._transport = cast("asyncio.Transport", transport)
        _keep_alive(transport.get_extra_info("socket"))
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._received += data
        if len(self._received) > MAX_PACKET_BYTES + 4 or self.on_lost is not None:
            self.close()  # more than a packet, or any word after the handshake
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._is_over = True
        self._wake()
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send(self, packet: bytes) -> None:
        """Send one packet of the handshake."""
        if self._transport is not None and not self._is_over:
            self._transport.write(len(packet).to_bytes(4, "big") + packet)

    async def receive(self) -> bytes:
        """The next packet of the handshake. Raises HandshakeRefused, LinkLost."""
        while True:
            size = int.from_bytes(self._received[:4], "big")
            if len(self._received) >= 4 and size > MAX_PACKET_BYTES:
                raise HandshakeRefused(f"a packet of {size} bytes; this is no peer of ours")
            if len(self._received) >= 4 + size and len(self._received) >= 4:
                packet = bytes(self._received[4 : 4 + size])
                del self._received[: 4 + size]
                return packet
            if self._is_over:
                raise LinkLost("the peer hung up in the handshake: it ended, or it is busy")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def watch(self, on_lost: Callable[[], None]) -> None:
        """The handshake is over; call `on_lost` when the peer goes."""
        self.on_lost = on_lost
        if self._is_over or self._received:
            self.connection_lost(None)

    def close(self) -> None:
        """Hang up, after what was sent. Idempotent."""
        if self._transport is not None:
            self._transport.close()


def _keep_alive(connection: socket.socket) -> None:
    # a machine that loses its power sends no FIN
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
