"""Links from a home to the hosts of its modules, two to each: one for calls, one for all else."""

import asyncio
from collections.abc import Callable

import structlog

from libs.engine.hosting.port import HostLost
from libs.runtime.roster import Roster
from libs.runtime.runtime import Spawn
from libs.transport.port import LinkError, Transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.owner.remote_host import HostCalls, HostLink

log = structlog.get_logger()


class HostLinks:
    """By incarnation; made when first needed. `on_lost` hears which host is lost and why, `on_leaving` which
    host asks for its modules to be taken back."""

    def __init__(
        self,
        transport: Transport,
        calls: CallLinks,
        roster: Roster,
        spawn: Spawn,
        on_lost: Callable[[str, str], None],
        on_leaving: Callable[[str], None],
        *,
        fingerprint: str,
        timeout_seconds: float,
        ping_seconds: float,
    ) -> None:
        self._transport, self._calls, self._spawn = transport, calls, spawn
        self._on_lost, self._on_leaving = on_lost, on_leaving
        self._roster, self._fingerprint = roster, fingerprint
        self._timeout_seconds, self._ping_seconds = timeout_seconds, ping_seconds
        self._links: dict[str, HostLink] = {}
        self._connecting = asyncio.Lock()

    def get(self, worker: str) -> HostLink | None:
        """The Link that stands."""
        return self._links.get(worker)

    def workers(self) -> set[str]:
        """To whom Links stand."""
        return set(self._links)

    async def connect(self, worker: str) -> HostLink:
        """The Link that stands, or a new one. Raises HostLost."""
        async with self._connecting:
            if (standing := self._links.get(worker)) is not None:
                return standing
            presence = self._roster.get(worker)
            if presence is None:
                raise HostLost(worker, "it left the mesh")
            calls = await self._calls.connect(worker, presence.calls_address, self._calls_lost)
            try:
                host = await self._connect(worker, presence.hosting_address, calls)
            except BaseException:
                self._spawn("drop-calls", self._calls.drop(calls))
                raise
            self._links[worker] = host
            self._spawn("host-link", self._serve(host))
            if calls.lost is not None:  # meanwhile, when nobody knew yet whom it concerns
                self._calls_lost(calls, calls.lost.why)
            return host

    async def _connect(self, worker: str, address: str, calls: HostCalls) -> HostLink:
        try:
            link = await self._transport.connect(
                address, expected_peer=worker, timeout_seconds=self._timeout_seconds
            )
        except LinkError as error:
            raise HostLost(worker, str(error)) from error
        return HostLink(
            link,
            calls,
            fingerprint=self._fingerprint,
            on_leaving=lambda: self._on_leaving(worker),
            timeout_seconds=self._timeout_seconds,
            ping_seconds=self._ping_seconds,
        )

    def _calls_lost(self, calls: HostCalls, why: str) -> None:
        if (host := self._links.get(calls.worker)) is not None and host.calls is calls:
            self._spawn("drop-host", host.close(why))

    def drop(self, worker: str, why: str) -> None:
        """Cut the Link, if there is one; `on_lost` is not told of it. Who connects again gets a new one."""
        if (host := self._links.pop(worker, None)) is not None:
            self._spawn("drop-host", host.close(why))

    async def _serve(self, host: HostLink) -> None:
        reason = await host.serve()
        log.info("host_link_ended", host=host.worker, reason=reason)
        if self._links.get(host.worker) is host:
            del self._links[host.worker]
            self._on_lost(host.worker, reason)
        await self._calls.drop(host.calls)
