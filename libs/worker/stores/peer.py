"""One store as a worker knows it: whether it is worth asking, and the Link to it."""

import time
from collections.abc import Sequence

import structlog

from libs.bus.bus import Bus
from libs.bus.errors import BusError, MessageTooLarge, NoResponders, NotConnected
from libs.bus.messages.presence import Presence
from libs.bus.messages.store import BlocksCorrupt, FindPrefix, PrefixHeld
from libs.kv.tensors import BlockShape
from libs.runtime.runtime import Spawn
from libs.transport.link_pool import LinkPool
from libs.transport.port import LinkError, LinkLost, Transport
from libs.worker.stores.circuit_breaker import CircuitBreaker
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.store_link import FetchResult, StoreLink, WriteBlocks
from libs.worker.stores.upload_part import UploadPart

log = structlog.get_logger()


class StorePeer:
    """One incarnation. Its Link is made when it is met, and again after it broke."""

    def __init__(
        self,
        presence: Presence,
        bus: Bus,
        transport: Transport,
        links: LinkPool[StoreLink],
        spawn: Spawn,
        metrics: StoreMetrics,
        shape: BlockShape,
        num_layers: int,
        *,
        timeout_seconds: float,
    ) -> None:
        self.presence, self._incarnation = presence, presence.incarnation
        self._bus, self._transport, self._spawn, self._metrics = bus, transport, spawn, metrics
        self._links = links
        self._shape, self._num_layers = shape, num_layers
        self._timeout_seconds = timeout_seconds
        """For a Link to be made, and for a frame of a put to be taken."""
        self._circuit = CircuitBreaker()
        self._has_left = False

    @property
    def is_connected(self) -> bool:
        """Whether its Link stands."""
        return self._links.get(self._incarnation) is not None

    def meet(self) -> None:
        """Make the Link in the background, before the first prefix needs it."""
        if not self._links.is_connecting(self._incarnation) and self._circuit.is_due(time.monotonic()):
            self._spawn("meet-store", self._meet())

    def leave(self) -> None:
        """It has left the mesh."""
        self._has_left = True
        self._links.drop(self._incarnation)

    async def find(self, question: FindPrefix, *, timeout_seconds: float) -> PrefixHeld | None:
        """None: it did not answer, or did not for too long to be asked."""
        if not self._circuit.is_due(time.monotonic()):
            return None
        try:
            answer = await self._bus.request(question, to=self._incarnation, timeout_seconds=timeout_seconds)
        except (MessageTooLarge, NoResponders, NotConnected) as error:
            # Told at once, so asking again costs nobody anything.
            log.info("store_not_asked", store=self.presence.name, reason=str(error))
            return None
        except BusError as error:
            log.info("store_not_asked", store=self.presence.name, reason=str(error))
            self._circuit.failed(time.monotonic())
            return None
        self._circuit.succeeded()
        return answer

    async def fetch(
        self, names: Sequence[bytes], segments: Sequence[range], write: WriteBlocks, *, timeout_seconds: float
    ) -> tuple[FetchResult, float]:
        """See StoreLink. Out of reach it holds nobody up: this prompt computes, a later one may fetch."""
        if (link := self._links.get(self._incarnation)) is None:
            self.meet()
            return FetchResult.FAILED, 0.0
        result, seconds = await link.fetch(names, segments, write, timeout_seconds=timeout_seconds)
        if result is FetchResult.FAILED:
            self._circuit.failed(time.monotonic())
        if result is FetchResult.CORRUPT:
            self._spawn("doubt-blocks", self._doubt(names))
        return result, seconds

    async def put(self, part: UploadPart) -> bool:
        """Whether it was sent; puts of one store go one after the other."""
        if not self.is_connected and not self._circuit.is_due(time.monotonic()):
            return False
        try:
            await (await self._connected()).put(part)
        except LinkError as error:
            self._circuit.failed(time.monotonic())
            log.info("blocks_not_put", store=self.presence.name, reason=str(error))
            return False
        return True

    async def _doubt(self, names: Sequence[bytes]) -> None:
        """Some of them may be wrong in the store's memory, and would be for every prompt that wants them."""
        try:
            await self._bus.publish(BlocksCorrupt(names=b"".join(names)), to=self._incarnation)
        except BusError as error:
            log.info("store_not_told", store=self.presence.name, reason=str(error))

    async def _meet(self) -> None:
        try:
            await self._connected()
        except LinkError as error:
            self._circuit.failed(time.monotonic())
            log.info("store_not_reached", store=self.presence.name, reason=str(error))

    async def _connected(self) -> StoreLink:
        if self._has_left:
            raise LinkLost(f"{self.presence.name} has left the mesh")
        return await self._links.connect(self._incarnation, self._connect)

    async def _connect(self) -> StoreLink:
        link = await self._transport.connect(
            self.presence.link_address,
            expected_peer=self._incarnation,
            timeout_seconds=self._timeout_seconds,
        )
        return StoreLink(
            link, self._shape, self._num_layers, self._metrics, send_timeout_seconds=self._timeout_seconds
        )
