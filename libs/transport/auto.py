"""Links through shared memory to peers that can be reached that way, over UCX to all others."""

import structlog

from libs.transport.acceptor import Acceptor
from libs.transport.link import PeerLink
from libs.transport.port import LinkLost, Listener, ListenFailed
from libs.transport.shm import ShmTransport, shares_memory
from libs.transport.ucx.transport import UcxTransport

_log = structlog.get_logger(__name__)


class AutoListener:
    """Accepts Links that come either way (port.Listener). Its address tells both."""

    def __init__(self, acceptor: Acceptor, listeners: list[Listener]) -> None:
        self._acceptor, self._listeners = acceptor, listeners

    @property
    def address(self) -> str:
        """See port.Listener."""
        return ",".join(listener.address for listener in self._listeners)

    async def accept(self) -> PeerLink:
        """See port.Listener."""
        return await self._acceptor.accept()

    async def close(self) -> None:
        """See port.Listener."""
        for listener in self._listeners:
            await listener.close()


class AutoTransport:
    """Listens both ways; whoever connects chooses (port.Transport)."""

    def __init__(self, shm: ShmTransport, ucx: UcxTransport) -> None:
        self.shm, self.ucx = shm, ucx

    async def listen(self, host: str, port: int = 0) -> AutoListener:
        """See port.Transport."""
        acceptor = Acceptor()
        listeners: list[Listener] = [await self.ucx.listen(host, port, acceptor)]
        try:
            listeners.append(await self.shm.listen(host, port, acceptor))
        except ListenFailed as error:
            _log.info("no_links_through_shared_memory", reason=str(error))
        return AutoListener(acceptor, listeners)

    async def connect(self, address: str, *, expected_peer: str = "", timeout_seconds: float) -> PeerLink:
        """See port.Transport."""
        if shares_memory(address):
            try:
                return await self.shm.connect(
                    address, expected_peer=expected_peer, timeout_seconds=timeout_seconds
                )
            except LinkLost as error:
                _log.info("no_link_through_shared_memory", peer=expected_peer, reason=str(error))
        return await self.ucx.connect(address, expected_peer=expected_peer, timeout_seconds=timeout_seconds)

    @property
    def spans_loops(self) -> bool:
        """See port.Transport."""
        return True

    def num_open_links(self) -> int:
        """See port.Transport."""
        return self.shm.num_open_links() + self.ucx.num_open_links()

    async def close(self) -> None:
        """See port.Transport."""
        await self.shm.close()
        await self.ucx.close()
