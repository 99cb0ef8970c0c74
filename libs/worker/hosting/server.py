"""Where homes come to with their modules."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import structlog

from libs.runtime.runtime import Spawn
from libs.transport.port import Link, Listener
from libs.worker.hosting.guest import Guest, ModuleHosting
from libs.worker.hosting.incoming_weights import LayerForm

log = structlog.get_logger()


class HostingServer:
    """Accepts Links of guests on a listener of its own. One Link for each guest: a new one ends the old."""

    def __init__(
        self,
        listener: Listener,
        hosting: ModuleHosting,
        form: LayerForm,
        spawn: Spawn,
        on_change: Callable[[], None],
        *,
        fingerprint: str,
        lease_seconds: float,
        send_timeout_seconds: float,
    ) -> None:
        self._listener, self._hosting, self._form, self._spawn = listener, hosting, form, spawn
        self._on_change = on_change
        self._fingerprint = fingerprint
        self._lease_seconds, self._send_timeout_seconds = lease_seconds, send_timeout_seconds
        self._guests: dict[str, tuple[Guest, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._is_draining = False

    @property
    def address(self) -> str:
        """For presence."""
        return self._listener.address

    async def run(self) -> NoReturn:
        """Accept guests."""
        while True:
            link = await self._listener.accept()
            log.info("guest_came", guest=link.peer)
            before = self._guests.pop(link.peer, None)
            guest = self._guest(link)
            self._guests[link.peer] = guest, self._spawn("guest", self._serve(guest, before))

    async def drain(self) -> None:
        """Ask all guests to take their modules back; returns when the last one has."""
        self._is_draining = True
        for guest, _ in self._guests.values():
            guest.tell_leaving()
        while self._hosting.hosted():
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Accept no more."""
        await self._listener.close()

    def _note_change(self) -> None:
        self._changed.set()
        self._on_change()

    async def _serve(self, guest: Guest, before: tuple[Guest, asyncio.Task[None]] | None) -> None:
        if before is not None:  # what it has here goes by its name, and the new one has nothing yet
            await before[0].close()
            await asyncio.wait({before[1]})
        try:
            await guest.serve()
        finally:
            if (now := self._guests.get(guest.name)) is not None and now[0] is guest:
                del self._guests[guest.name]
            self._note_change()

    def _guest(self, link: Link) -> Guest:
        return Guest(
            link,
            self._hosting,
            self._form,
            fingerprint=self._fingerprint,
            lease_seconds=self._lease_seconds,
            send_timeout_seconds=self._send_timeout_seconds,
            on_change=self._note_change,
            is_leaving=lambda: self._is_draining,
        )
