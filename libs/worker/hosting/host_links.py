"""Links from a home to the hosts of its modules."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from libs.engine.hosting.port import HostLost
from libs.runtime.roster import Roster
from libs.runtime.runtime import Spawn
from libs.transport.port import LinkError, Transport
from libs.worker.hosting.host_link import HostLink

log = structlog.get_logger()


class HostEvents(Protocol):
    """What comes from hosts unasked. Called on the loop."""

    def host_lost(self, worker: str, why: str) -> None:
        """Its Link is over."""
        ...

    def host_leaving(self, worker: str) -> None:
        """It is about to end, and asks to take modules back."""
        ...


class HostLinks:
    """By incarnation; one Link each, made when it is first needed."""

    def __init__(
        self,
        transport: Transport,
        roster: Roster,
        spawn: Spawn,
        events: HostEvents,
        *,
        fingerprint: str,
        wake: Callable[[], None],
        on_call_done: Callable[[float], None],
        timeout_seconds: float,
        ping_seconds: float,
    ) -> None:
        self._transport, self._spawn, self._events, self._wake = transport, spawn, events, wake
        self._roster, self._fingerprint, self._on_call_done = roster, fingerprint, on_call_done
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
            address = presence.hosting_address
            try:
                link = await self._transport.connect(
                    address, expected_peer=worker, timeout_seconds=self._timeout_seconds
                )
            except LinkError as error:
                raise HostLost(worker, str(error)) from error
            host = HostLink(
                link,
                fingerprint=self._fingerprint,
                wake=self._wake,
                on_call_done=self._on_call_done,
                on_leaving=lambda: self._events.host_leaving(worker),
                timeout_seconds=self._timeout_seconds,
                ping_seconds=self._ping_seconds,
            )
            self._links[worker] = host
            self._spawn("host-link", self._serve(host))
            return host

    def drop(self, worker: str) -> None:
        """Cut the Link, if there is one; `host_lost` is not told of it. Who connects again gets a new one."""
        if (host := self._links.pop(worker, None)) is not None:
            self._spawn("drop-host", host.close())

    async def _serve(self, host: HostLink) -> None:
        reason = await host.serve()
        log.info("host_link_ended", host=host.worker, reason=reason)
        if self._links.get(host.worker) is host:
            del self._links[host.worker]
            self._events.host_lost(host.worker, reason)
