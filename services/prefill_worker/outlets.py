"""Links to decode workers, one for each incarnation, made when first needed and kept."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from libs.transport.port import LinkError, LinkLost, Transport
from services.prefill_worker.metrics import PrefillMetrics
from services.prefill_worker.outlet import Outlet, Release

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]

log = structlog.get_logger()


class Outlets:
    """By incarnation of the decode worker. `on_lost` hears what was lost and why."""

    def __init__(
        self,
        transport: Transport,
        spawn: Spawn,
        release: Release,
        on_lost: Callable[[Outlet, str], None],
        metrics: PrefillMetrics,
        *,
        num_layers: int,
        connect_timeout_seconds: float,
        send_timeout_seconds: float,
    ) -> None:
        self._transport, self._spawn, self._release = transport, spawn, release
        self._on_lost, self._metrics = on_lost, metrics
        self._num_layers = num_layers
        self._connect_timeout_seconds = connect_timeout_seconds
        self._send_timeout_seconds = send_timeout_seconds
        self._open: dict[str, Outlet] = {}
        self._connecting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, decode: str, address: str) -> Outlet:
        """The outlet to this incarnation. Raises LinkError where it cannot be reached in time."""
        async with self._connecting[decode]:
            outlet = self._open.get(decode)
            if outlet is None or not outlet.is_open:
                outlet = await self._connect(decode, address)
            return outlet

    async def greet(self, decode: str, address: str) -> None:
        """Make the Link before the first prompt needs it: a process's first one may take half a second."""
        try:
            await self.get(decode, address)
        except LinkError as error:
            log.info("decode_worker_not_reached", peer=decode, reason=str(error))

    async def renew(self, waiting: dict[str, list[str]]) -> None:
        """Tell each decode worker which requests of it are still to come."""
        for decode, request_ids in waiting.items():
            outlet = self._open.get(decode)
            if outlet is not None and outlet.is_open:
                await outlet.renew(request_ids)

    def forget(self, decode: str) -> None:
        """This incarnation has left the mesh; nobody else will answer for it."""
        self._connecting.pop(decode, None)
        outlet = self._open.pop(decode, None)
        if outlet is not None:
            self._spawn("close-outlet", outlet.close())

    async def _connect(self, decode: str, address: str) -> Outlet:
        if not address:
            raise LinkLost(f"{decode} told no address for its Links")
        link = await self._transport.connect(
            address, expected_peer=decode, timeout_seconds=self._connect_timeout_seconds
        )
        outlet = self._open[decode] = Outlet(
            link,
            self._release,
            self._metrics,
            num_layers=self._num_layers,
            send_timeout_seconds=self._send_timeout_seconds,
        )
        self._spawn("outlet", self._serve(decode, outlet))
        return outlet

    async def _serve(self, decode: str, outlet: Outlet) -> None:
        reason = await outlet.serve()
        if self._open.get(decode) is outlet:
            del self._open[decode]
        log.info("decode_link_ended", peer=decode, reason=reason)
        self._on_lost(outlet, reason)
