"""Accepts the owners of modules that run here, and serves each over its Link."""

import asyncio
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import NoReturn

import structlog
import torch

from libs.engine.errors import EngineError, NoRoom
from libs.engine.hosting.hosting import Hosting
from libs.model.layer import Layer
from libs.runtime.runtime import Spawn
from libs.transport.port import Link, LinkError, Listener, Received
from libs.worker.migration.framing import Assembly, BadFrame, Message, Outgoing
from libs.worker.migration.host.weights import IncomingWeights, LayerForm
from libs.worker.migration.protocol import (
    Close,
    Closed,
    Leaving,
    Open,
    Opened,
    OpenRefused,
    Ping,
    Pong,
    RefusalKind,
    WeightPiece,
    WeightsAt,
)
from libs.worker.migration.threads import run_in_thread

MAX_DETAIL_CHARACTERS = 1000
"""Of what a refusal says: it travels in a header."""

log = structlog.get_logger()


class OwnerLink:
    """Serves one Link until it is lost, or silent for longer than `lease_seconds`; then nothing of it is
    left here. Its calls come over another, see `guest_calls`. `on_change` hears when modules came or left."""

    def __init__(
        self,
        link: Link,
        hosting: Hosting,
        form: LayerForm,
        *,
        fingerprint: str,
        lease_seconds: float,
        send_timeout_seconds: float,
        on_change: Callable[[], None],
        is_leaving: Callable[[], bool],
    ) -> None:
        self._on_change, self._is_leaving = on_change, is_leaving
        self._link, self._hosting, self._form, self._fingerprint = link, hosting, form, fingerprint
        self._lease_seconds = lease_seconds
        self._outgoing = Outgoing(link, send_timeout_seconds)
        self._assembly = Assembly()
        self._weights: dict[str, tuple[IncomingWeights, MutableMapping[int, Layer]]] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}

    @property
    def name(self) -> str:
        """The owner's incarnation."""
        return self._link.peer

    def announce_leaving(self) -> None:
        """Ask the owner to take its modules back."""
        self._outgoing.put(Leaving())

    async def serve(self) -> None:
        """Returns when the Link is over and everything of this owner is freed."""
        reason = "this worker is closing"
        try:
            async with asyncio.TaskGroup() as tasks:
                reason = await self._receive(tasks)
        finally:
            log.info("owner_link_ended", owner=self.name, reason=reason)
            self._outgoing.close()
            with suppress(EngineError):  # an engine that is closed has nobody's modules
                await self._hosting.close_owner(self.name)
            await self._link.close()

    async def close(self) -> None:
        """Idempotent; `serve` returns."""
        await self._link.close()

    async def _receive(self, tasks: asyncio.TaskGroup) -> str:
        while True:
            try:
                self._take(await self._link.receive(timeout_seconds=self._lease_seconds), tasks)
            except (LinkError, BadFrame) as ended:
                return str(ended)

    def _take(self, frame: Received, tasks: asyncio.TaskGroup) -> None:
        try:
            message = self._assembly.take(frame.header, frame.body)
            if message is not None:
                self._handle(message, tasks)
        finally:
            frame.release()

    def _handle(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        match message.head:
            case Open() as head:
                self._opening[head.move_id] = tasks.create_task(self._open(head))
            case WeightPiece() as head:
                layers, tensors = self._take_weights(head)
                if tensors:
                    tasks.create_task(self._build_layer(head, tensors, layers))
                else:
                    self._outgoing.put(WeightsAt(ask_id=head.ask_id))
            case Close() as head:
                self._weights.pop(head.move_id, None)
                tasks.create_task(self._close(head))
            case Ping() as head:
                if head.ask_id:  # else that it came is what counts
                    self._outgoing.put(Pong(ask_id=head.ask_id))
            case other:
                raise BadFrame(f"a home sent {type(other).__name__}")

    async def _open(self, head: Open) -> None:
        if (why := self._why_refused(head)) is not None:
            self._refuse(head.ask_id, RefusalKind.REFUSED, why)
            return
        layers: dict[int, Layer] | None = {} if head.has_weights else None
        try:
            num_blocks = await self._hosting.open(
                self.name,
                head.move_id,
                head.module,
                num_blocks_wanted=head.num_blocks_wanted,
                num_blocks_least=head.num_blocks_least,
                layers=layers,
                weight_bytes=len(head.module.layers) * self._form.num_bytes if head.has_weights else 0,
            )
        except EngineError as error:
            kind = RefusalKind.NO_ROOM if isinstance(error, NoRoom) else RefusalKind.REFUSED
            self._refuse(head.ask_id, kind, str(error))
            return
        if layers is not None:
            incoming = IncomingWeights(self._form, head.module.layers)
            self._weights[head.move_id] = incoming, layers
        log.info("module_hosted", owner=self.name, move_id=head.move_id, num_blocks=num_blocks)
        self._outgoing.put(Opened(ask_id=head.ask_id, num_blocks=num_blocks))
        self._on_change()

    def _why_refused(self, head: Open) -> str | None:
        if self._is_leaving():
            return "the host is about to end; choose another"
        if head.fingerprint != self._fingerprint:
            return (
                f"the host's model or block size is another ({self._fingerprint}) than the home's "
                f"({head.fingerprint}); choose a host that has the same"
            )
        return None

    def _take_weights(
        self, head: WeightPiece
    ) -> tuple[MutableMapping[int, Layer], Mapping[str, torch.Tensor]]:
        """The module's layers, and the tensors of one that is whole now, if it is."""
        if (found := self._weights.get(head.move_id)) is None:
            raise BadFrame(f"weights of the module {head.move_id!r}, which awaits none")
        incoming, layers = found
        return layers, incoming.take(head.layer, head.name, head.first_byte, head.piece)

    async def _build_layer(
        self, head: WeightPiece, tensors: Mapping[str, torch.Tensor], layers: MutableMapping[int, Layer]
    ) -> None:
        """The module may be closed meanwhile; then nobody needs the layer."""
        layers[head.layer] = await run_in_thread(partial(self._form.build, tensors))
        self._outgoing.put(WeightsAt(ask_id=head.ask_id))

    async def _close(self, head: Close) -> None:
        if (opening := self._opening.pop(head.move_id, None)) is not None:
            await asyncio.wait({opening})  # given up meanwhile, or long done
        with suppress(EngineError):  # an engine that is closed has nobody's modules
            await self._hosting.close(self.name, head.move_id)
        log.info("hosted_module_closed", owner=self.name, move_id=head.move_id)
        self._outgoing.put(Closed(ask_id=head.ask_id))
        self._on_change()

    def _refuse(self, ask_id: int, kind: RefusalKind, detail: str) -> None:
        self._outgoing.put(OpenRefused(ask_id=ask_id, kind=kind, detail=detail[:MAX_DETAIL_CHARACTERS]))


class HostingServer:
    """Accepts Links of owners on a listener of its own. One Link for each owner: a new one ends the old."""

    def __init__(
        self,
        listener: Listener,
        hosting: Hosting,
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
        self._owners: dict[str, tuple[OwnerLink, asyncio.Task[None]]] = {}
        self._changed = asyncio.Event()
        self._is_draining = False

    @property
    def address(self) -> str:
        """For presence."""
        return self._listener.address

    async def run(self) -> NoReturn:
        """Accept owners."""
        while True:
            link = await self._listener.accept()
            log.info("owner_connected", owner=link.peer)
            before = self._owners.pop(link.peer, None)
            owner = self._owner(link)
            self._owners[link.peer] = owner, self._spawn("owner", self._serve(owner, before))

    async def drain(self) -> None:
        """Ask all owners to take their modules back; returns when the last one has."""
        self._is_draining = True
        for owner, _ in self._owners.values():
            owner.announce_leaving()
        while self._hosting.hosted():
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Accept no more."""
        await self._listener.close()

    def _note_change(self) -> None:
        self._changed.set()
        self._on_change()

    async def _serve(self, owner: OwnerLink, before: tuple[OwnerLink, asyncio.Task[None]] | None) -> None:
        if before is not None:  # what it has here goes by its name, and the new one has nothing yet
            await before[0].close()
            await asyncio.wait({before[1]})
        try:
            await owner.serve()
        finally:
            if (now := self._owners.get(owner.name)) is not None and now[0] is owner:
                del self._owners[owner.name]
            self._note_change()

    def _owner(self, link: Link) -> OwnerLink:
        return OwnerLink(
            link,
            self._hosting,
            self._form,
            fingerprint=self._fingerprint,
            lease_seconds=self._lease_seconds,
            send_timeout_seconds=self._send_timeout_seconds,
            on_change=self._note_change,
            is_leaving=lambda: self._is_draining,
        )
