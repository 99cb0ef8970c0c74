"""Links to decode workers, one for each incarnation, made when first needed and kept."""

from functools import partial

import structlog

from libs.runtime.runtime import Spawn
from libs.transport.link_pool import LinkPool
from libs.transport.port import LinkError, LinkLost, Transport
from libs.worker.metrics import WorkerMetrics
from libs.worker.prefill.kv_sender import KvSender, Release
from libs.worker.settings import WorkerSettings

log = structlog.get_logger()


class KvSenders:
    """By incarnation of the decode worker."""

    def __init__(
        self,
        transport: Transport,
        spawn: Spawn,
        release: Release,
        metrics: WorkerMetrics,
        settings: WorkerSettings,
        num_layers: int,
    ) -> None:
        self._transport, self._release = transport, release
        self._metrics, self._settings, self._num_layers = metrics, settings, num_layers
        self._pool: LinkPool[KvSender] = LinkPool(spawn)

    async def get(self, decode: str, address: str) -> KvSender:
        """The sender to this incarnation. Raises LinkError where it cannot be reached in time."""
        return await self._pool.connect(decode, partial(self._connect, decode, address))

    async def connect(self, decode: str, address: str) -> None:
        """Make the Link before the first prompt needs it: a process's first one may take half a second."""
        try:
            await self.get(decode, address)
        except LinkError as error:
            log.info("decode_worker_not_reached", peer=decode, reason=str(error))

    async def renew(self) -> None:
        """Tell each decode worker which of its requests are still to come."""
        for decode in self._pool.peers():
            if (sender := self._pool.get(decode)) is not None:
                await sender.renew()

    def forget(self, decode: str) -> None:
        """This incarnation has left the mesh; nobody else will answer for it."""
        self._pool.drop(decode)

    async def _connect(self, decode: str, address: str) -> KvSender:
        if not address:
            raise LinkLost(f"{decode} tells no address for its Links")
        link = await self._transport.connect(
            address, expected_peer=decode, timeout_seconds=self._settings.connect_timeout_seconds
        )
        return KvSender(
            link,
            self._release,
            self._metrics,
            num_layers=self._num_layers,
            send_timeout_seconds=self._settings.send_timeout_seconds,
        )
