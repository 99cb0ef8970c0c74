"""Packets and file descriptors over a Unix socket, in an event loop. SOCK_SEQPACKET keeps the borders of
packets; the names are abstract, so nothing is left behind in a file system."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable

from libs.transport.handshake import MAX_PACKET_BYTES
from libs.transport.port import HandshakeRefused, LinkLost

RECEIVE_BYTES = 64 << 10
PACKETS_PER_WAKEUP = 16

OnPacket = Callable[[bytes, int], None]
"""Takes a packet and the descriptor that came with it, or -1."""


class PacketSocket:
    """A connected socket. First the handshake's line (acceptor.Line), then, after `watch`, whatever comes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[bytes, int]] = deque()  # bounded by the Link's credits
        self._received: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._on_packet: OnPacket = self._keep
        self._on_lost: Callable[[], None] | None = None
        self._is_over = False
        self._loop.add_reader(connection, self._read)

    def send(self, packet: bytes, descriptor: int = -1) -> None:
        """Send a packet, now or when there is room. The descriptor must stay open until then: pass its
        ownership."""
        if self._is_over:
            _close_descriptor(descriptor)
            return
        self._unsent.append((packet, descriptor))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                packet, descriptor = self._unsent[0]
                if descriptor < 0:
                    self._socket.send(packet)
                else:
                    socket.send_fds(self._socket, [packet], [descriptor])
                    _close_descriptor(descriptor)
                self._unsent.popleft()
            self._loop.remove_writer(self._socket)
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            self._end()

    def _read(self) -> None:
        try:
            for _ in range(PACKETS_PER_WAKEUP):
                packet, descriptors, flags, _ = socket.recv_fds(self._socket, RECEIVE_BYTES, 1)
                if not packet or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                    self._end()
                    return
                self._on_packet(packet, descriptors[0] if descriptors else -1)
                if self._is_over:
                    return
        except BlockingIOError:
            pass
        except OSError:
            self._end()

    def _keep(self, packet: bytes, descriptor: int) -> None:
        _close_descriptor(descriptor)
        self._received.append(packet)
        if len(self._received) > 2:
            self._end()  # no handshake has so much to say at once
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> bytes:
        """See acceptor.Line."""
        while not self._received:
            if self._is_over:
                raise LinkLost("the peer hung up in the handshake: it ended, or it is busy")
            self._waiter = self._loop.create_future()
            await self._waiter
        packet = self._received.popleft()
        if len(packet) > MAX_PACKET_BYTES:
            raise HandshakeRefused(f"a packet of {len(packet)} bytes; this is no peer of ours")
        return packet

    def watch(self, on_packet: OnPacket, on_lost: Callable[[], None]) -> None:
        """The handshake is over: hand packets to `on_packet`, and call `on_lost` once when the peer goes."""
        self._on_packet, self._on_lost = on_packet, on_lost
        while self._received:
            on_packet(self._received.popleft(), -1)
        if self._is_over:
            self._loop.call_soon(on_lost)

    def close(self) -> None:
        """See acceptor.Line."""
        self._on_lost = None
        self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        while self._unsent:
            _close_descriptor(self._unsent.popleft()[1])
        self._wake()
        if self._on_lost is not None:
            self._on_lost()


class PacketServer:
    """Listens on an abstract name and hands over each connection."""

    def __init__(self, name: str, on_connected: Callable[[PacketSocket], None]) -> None:
        """Raises OSError."""
        self._on_connected = on_connected
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(f"\0{name}")
            self._socket.listen(128)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # it hung up already, or we are out of descriptors: it stays in line
        self._on_connected(PacketSocket(connection))

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()


async def connect_packets(name: str) -> PacketSocket:
    """Connect to an abstract name. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)
        while True:
            try:
                connection.connect(f"\0{name}")
            except BlockingIOError:
                await asyncio.sleep(
                    0.005
                )  # its line of connections is full; Unix sockets give no event for room
            else:
                return PacketSocket(connection)
    except BaseException:
        connection.close()
        raise


def _close_descriptor(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
