"""The UCX transport: a TCP bootstrap that proves who is there, then a Link over UCX between the two
workers."""

import asyncio
from collections.abc import Callable

import msgspec

from libs.transport.acceptor import Acceptor, Prepared, connect_line
from libs.transport.handshake import Identity, Side
from libs.transport.link import PeerLink
from libs.transport.memory import Memory
from libs.transport.open_links import OpenLinks
from libs.transport.pool import BufferPool, allocate_host
from libs.transport.port import LinkLost, LinkTimeout, ListenFailed
from libs.transport.ucx.bootstrap import Lifeline, format_address, parse_address
from libs.transport.ucx.context import UcxContext
from libs.transport.ucx.ucp_library import load_library
from libs.transport.ucx.wire import UcxWire


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Where one side receives: its worker, and the token that marks this Link's messages."""

    token: int
    worker_address: bytes


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Offer)


class UcxListener:
    """Accepts Links at one host and port (port.Listener)."""

    def __init__(self, serve: "Callable[[UcxListener, Lifeline], None]", acceptor: Acceptor) -> None:
        self._serve = serve
        self._server: asyncio.Server | None = None
        self._address = ""
        self.acceptor = acceptor

    async def open(self, host: str, port: int) -> None:
        """Bind. Raises ListenFailed."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: Lifeline(lambda lifeline: self._serve(self, lifeline)), host or None, port
            )
        except OSError as error:
            raise ListenFailed(f"cannot listen on {host}:{port}: {error}") from error
        self._address = format_address(host, self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """See port.Listener."""
        return self._address

    async def accept(self) -> PeerLink:
        """See port.Listener."""
        return await self.acceptor.accept()

    async def close(self) -> None:
        """See port.Listener."""
        if self._server is not None:
            self._server.close()
        await self.acceptor.close()


class UcxTransport:
    """Makes Links over UCX (port.Transport). `allocate` makes the buffers that large bodies are received
    into; one that allocates device memory lets them land there, as `Frame.memory`."""

    def __init__(
        self, me: Identity, idle_pool_bytes: int, allocate: Callable[[int], Memory] = allocate_host
    ) -> None:
        self.me, self.links = me, OpenLinks()
        self.pool = BufferPool(idle_pool_bytes, allocate)
        self.context = UcxContext()
        self._listeners: set[UcxListener] = set()

    async def listen(self, host: str, port: int = 0, acceptor: Acceptor | None = None) -> UcxListener:
        """See port.Transport. Links wait in `acceptor`."""
        load_library()
        listener = UcxListener(self._handshake, acceptor or Acceptor())
        await listener.open(host, port)
        self._listeners.add(listener)
        return listener

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> PeerLink:
        """See port.Transport."""
        host, port = parse_address(address)
        lifeline = Lifeline()
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.get_running_loop().create_connection(lambda: lifeline, host, port)
                return await connect_line(
                    self.me, lifeline, expected_peer, lambda side: self._prepare(side, lifeline)
                )
        except TimeoutError:
            raise LinkTimeout(f"{address} did not answer within {timeout_seconds} s") from None
        except OSError as error:
            raise LinkLost(f"cannot reach {address}: {error}") from error

    def _handshake(self, listener: UcxListener, lifeline: Lifeline) -> None:
        listener.acceptor.shake_hands(self.me, lifeline, lambda side: self._prepare(side, lifeline))

    def _prepare(self, side: Side, lifeline: Lifeline) -> Prepared:
        link = PeerLink(side.peer.incarnation, self.me.limits, side.peer.limits, self.links.discard)
        wire = UcxWire(self.context, link, self.pool, lifeline.close)
        link.attach(wire)
        self.links.add(link)

        def join(theirs: bytes) -> None:
            offer = _decoder.decode(theirs)
            wire.connect(offer.worker_address, offer.token)
            lifeline.watch(lambda: link.lose(LinkLost(f"{link.peer} is gone")))

        return Prepared(link, _encode(Offer(wire.token, wire.address)), join)

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
        await self.context.close()
        self.pool.close()
