"""The KV store as a prefill worker uses it: a prefix where there is one, a miss in every other case."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from libs.bus.messages.presence import Presence
from libs.bus.port import BusError
from libs.kv.tensors import BlockShape
from libs.transport.port import LinkError, Transport
from services.prefill_worker.metrics import PrefillMetrics
from services.prefill_worker.outlets import Spawn
from services.prefill_worker.settings import PrefillWorkerSettings
from services.prefill_worker.store_link import FetchResult, StoreLink, WriteLayer
from services.prefill_worker.store_put import StorePut

MIB = 1 << 20

FindPrefixHeld = Callable[[str, Sequence[bytes]], Awaitable[int]]
"""Incarnation of a store, and names; how many of the first it holds. Raises BusError."""

log = structlog.get_logger()


class Store:
    """The first ready store of the mesh, if any; and the blocks on their way to it, bounded."""

    def __init__(
        self,
        transport: Transport,
        spawn: Spawn,
        find: FindPrefixHeld,
        metrics: PrefillMetrics,
        settings: PrefillWorkerSettings,
        shape: BlockShape,
        num_layers: int,
    ) -> None:
        self._transport, self._spawn, self._find = transport, spawn, find
        self._metrics, self._settings = metrics, settings
        self._shape, self._num_layers = shape, num_layers
        self._presence: Presence | None = None
        self._link: StoreLink | None = None
        self._connecting = asyncio.Lock()
        self._puts: asyncio.Queue[StorePut] = asyncio.Queue()
        self.num_kept_bytes = 0
        """Of puts collected or queued; bounds the queue."""

    @property
    def is_there(self) -> bool:
        """Whether asking is worth anything."""
        return self._presence is not None

    def set_stores(self, ready: Sequence[Presence]) -> None:
        """The ready stores, in order of arrival."""
        usable = [presence for presence in ready if presence.link_address]
        chosen = usable[0] if usable else None
        before, self._presence = self._presence, chosen
        if self._link is not None and (
            chosen is None or before is None or chosen.incarnation != before.incarnation
        ):
            link, self._link = self._link, None
            self._spawn("close-store-link", link.close())
        if chosen is not None and (before is None or chosen.incarnation != before.incarnation):
            self._spawn("greet-store", self._greet(chosen))

    async def load(self, names: Sequence[bytes], num_here: int, write: WriteLayer) -> tuple[int, int | None]:
        """Bring blocks after the first `num_here` of a prompt, as far as the store holds them.

        Returns how many blocks are here now, and how many the store holds (None where it could not be asked).
        """
        presence = self._presence
        if presence is None or num_here >= len(names):
            return num_here, None
        try:
            num_held = await self._find(presence.incarnation, names)
        except BusError as error:
            log.info("store_not_asked", store=presence.name, reason=str(error))
            self._metrics.store_fetches.labels("failed").inc()
            return num_here, None
        if num_held <= num_here:
            self._metrics.store_fetches.labels("none").inc()
            return num_here, num_held
        result = await self._fetch(presence, names[num_here:num_held], write)
        self._metrics.store_fetches.labels(result.value).inc()
        return (num_held if result is FetchResult.HIT else num_here), num_held

    def begin_put(self, names: list[bytes], first_block: int) -> StorePut | None:
        """Start to collect blocks `first_block` on; None: there is nothing to put, or too much is kept."""
        fresh = names[first_block:]
        if not fresh or self._presence is None:
            return None
        num_bytes = self._bytes_of(len(fresh))
        if self.num_kept_bytes + num_bytes > self._settings.store_put_mib * MIB:
            self._metrics.store_puts.labels("dropped").inc(len(fresh))
            return None
        self.num_kept_bytes += num_bytes
        return StorePut(fresh, first_block, self._num_layers)

    def end_put(self, put: StorePut) -> None:
        """Nothing more will be collected: send it if it is complete."""
        if put.is_complete:
            self._puts.put_nowait(put)
        else:
            self._ended(put, "dropped")

    async def send_puts(self) -> None:
        """For ever, one after the other: puts must not crowd out hand-overs."""
        while True:
            put = await self._puts.get()
            result = "dropped"
            try:
                if (presence := self._presence) is not None:
                    await (await self._connected(presence)).put(put)
                    result = "sent"
            except LinkError as error:
                log.info("blocks_not_put", reason=str(error))
            finally:
                self._ended(put, result)

    async def _greet(self, presence: Presence) -> None:
        """Make the Link before the first prefix needs it."""
        try:
            await self._connected(presence)
        except LinkError as error:
            log.info("store_not_reached", store=presence.name, reason=str(error))

    async def _fetch(self, presence: Presence, names: Sequence[bytes], write: WriteLayer) -> FetchResult:
        link = self._link
        if link is None or not link.is_open:
            # A store out of reach must not hold prompts up: this one computes, a later one may fetch.
            if not self._connecting.locked():
                self._spawn("greet-store", self._greet(presence))
            return FetchResult.FAILED
        return await link.fetch(names, write, timeout_seconds=self._settings.store_fetch_timeout_seconds)

    async def _connected(self, presence: Presence) -> StoreLink:
        async with self._connecting:
            if self._link is None or not self._link.is_open:
                link = await self._transport.connect(
                    presence.link_address,
                    expected_peer=presence.incarnation,
                    timeout_seconds=self._settings.store_fetch_timeout_seconds,
                )
                self._link = StoreLink(
                    link,
                    self._shape,
                    self._num_layers,
                    self._metrics,
                    send_timeout_seconds=self._settings.send_timeout_seconds,
                )
                self._spawn("store-link", self._serve(self._link, presence))
            return self._link

    async def _serve(self, link: StoreLink, presence: Presence) -> None:
        reason = await link.serve()
        log.info("store_link_ended", store=presence.name, reason=reason)

    def _ended(self, put: StorePut, result: str) -> None:
        self.num_kept_bytes -= self._bytes_of(len(put.names))
        self._metrics.store_puts.labels(result).inc(len(put.names))

    def _bytes_of(self, num_blocks: int) -> int:
        return num_blocks * self._num_layers * self._shape.num_bytes
