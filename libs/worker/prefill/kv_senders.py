"""Links to decode workers, one for each incarnation, made when first needed and kept."""

import asyncio
from collections import defaultdict

import structlog

from libs.runtime.runtime import Spawn
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
        self._transport, self._spawn, self._release = transport, spawn, release
        self._metrics, self._settings, self._num_layers = metrics, settings, num_layers
        self._open: dict[str, KvSender] = {}
        self._connecting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, decode: str, address: str) -> KvSender:
        """The sender to this incarnation. Raises LinkError where it cannot be reached in time."""
        async with self._connecting[decode]:
            sender = self._open.get(decode)
            if sender is None or not sender.is_open:
                sender = await self._connect(decode, address)
            return sender

    async def connect(self, decode: str, address: str) -> None:
        """Make the Link before the first prompt needs it: a process's first one may take half a second."""
        try:
            await self.get(decode, address)
        except LinkError as error:
            log.info("decode_worker_not_reached", peer=decode, reason=str(error))

    async def renew(self) -> None:
        """Tell each decode worker which of its requests are still to come."""
        for sender in list(self._open.values()):
            if sender.is_open:
                await sender.renew()

    def forget(self, decode: str) -> None:
        """This incarnation has left the mesh; nobody else will answer for it."""
        self._connecting.pop(decode, None)
        sender = self._open.pop(decode, None)
        if sender is not None:
            self._spawn("close-sender", sender.close())

    async def _connect(self, decode: str, address: str) -> KvSender:
        if not address:
            raise LinkLost(f"{decode} tells no address for its Links")
        link = await self._transport.connect(
            address, expected_peer=decode, timeout_seconds=self._settings.connect_timeout_seconds
        )
        sender = self._open[decode] = KvSender(
            link,
            self._release,
            self._metrics,
            num_layers=self._num_layers,
            send_timeout_seconds=self._settings.send_timeout_seconds,
        )
        self._spawn("sender", self._serve(decode, sender))
        return sender

    async def _serve(self, decode: str, sender: KvSender) -> None:
        reason = await sender.serve()
        if self._open.get(decode) is sender:
            del self._open[decode]
        log.info("decode_link_ended", peer=decode, reason=reason)
