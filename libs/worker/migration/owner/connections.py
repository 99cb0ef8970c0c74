"""Links from an owner to the hosts of its modules, two to each: one for calls, one for all else."""

from collections.abc import Callable
from functools import partial

from libs.engine.hosting.port import HostLost
from libs.runtime.roster import Roster
from libs.runtime.runtime import Spawn
from libs.transport.link_pool import LinkPool
from libs.transport.port import LinkError, Transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.owner.remote_host import HostCalls, RemoteHost


class HostConnections:
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
        self._pool: LinkPool[RemoteHost] = LinkPool(spawn, self._ended)

    def get(self, worker: str) -> RemoteHost | None:
        """The Link that stands."""
        return self._pool.get(worker)

    def workers(self) -> set[str]:
        """To whom Links stand."""
        return self._pool.peers()

    async def connect(self, worker: str) -> RemoteHost:
        """The Link that stands, or a new one. Raises HostLost."""
        try:
            host = await self._pool.connect(worker, partial(self._connect, worker))
        except LinkError as error:
            raise HostLost(worker, str(error)) from error
        if host.calls.lost is not None:  # before anybody knew whom it concerns
            self._calls_lost(host.calls, host.calls.lost.why)
        return host

    async def _connect(self, worker: str) -> RemoteHost:
        presence = self._roster.get(worker)
        if presence is None:
            raise HostLost(worker, "it left the mesh")
        calls = await self._calls.connect(worker, presence.calls_address, self._calls_lost)
        try:
            link = await self._transport.connect(
                presence.hosting_address, expected_peer=worker, timeout_seconds=self._timeout_seconds
            )
        except BaseException:
            self._spawn("drop-calls", self._calls.drop(calls))
            raise
        return RemoteHost(
            link,
            calls,
            fingerprint=self._fingerprint,
            on_leaving=lambda: self._on_leaving(worker),
            timeout_seconds=self._timeout_seconds,
            ping_seconds=self._ping_seconds,
        )

    def _calls_lost(self, calls: HostCalls, why: str) -> None:
        if (host := self.get(calls.worker)) is not None and host.calls is calls:
            self._spawn("drop-host", host.close(why))

    def drop(self, worker: str, why: str) -> None:
        """Cut the Link, if there is one; `on_lost` is not told of it. Who connects again gets a new one."""
        if (host := self._pool.drop(worker)) is not None:
            host.lose(why)

    def _ended(self, host: RemoteHost, reason: str, is_dropped: bool) -> None:
        if not is_dropped:
            self._on_lost(host.worker, reason)
        self._spawn("drop-calls", self._calls.drop(host.calls))
