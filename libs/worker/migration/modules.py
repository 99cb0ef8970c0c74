"""Everything a worker needs to host modules of others and to have its own hosted, made together."""

import asyncio
from collections.abc import Awaitable, Callable

from libs.bus.messages.presence import ServiceKind
from libs.engine.engine import Engine
from libs.model.model import Model
from libs.runtime.roster import Roster, RosterChange
from libs.runtime.runtime import Runtime
from libs.transport.port import Transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.host.server import HostingServer
from libs.worker.migration.host.weights import form_of
from libs.worker.migration.metrics import MigrationMetrics
from libs.worker.migration.owner.migrations import Migrations
from libs.worker.settings import WorkerSettings
from libs.worker.startup import block_shape_of, fingerprint_of, max_model_len_of


class Modules:
    """Moves of the own instance's modules, and those of others here."""

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        settings: WorkerSettings,
        model: Model,
        engine: Engine,
        roster: Roster,
        *,
        open_transport: Callable[[], Transport],
    ) -> None:
        """`open_transport` makes another one, for calls alone, on the engine's own loop; where Links could
        not leave the running loop, `transport` carries calls, too."""
        self._runtime, self._transport, self._settings = runtime, transport, settings
        self._form, self._engine = form_of(model), engine
        self._fingerprint = fingerprint_of(settings, model)
        metrics = MigrationMetrics(runtime.registry)
        self._calls = CallLinks(
            engine.own_loop if transport.spans_loops else None,
            open_transport if transport.spans_loops else lambda: transport,
            wake=engine.wake,
            timeout_seconds=settings.hosting_timeout_seconds,
            on_call_done=metrics.host_call_seconds.observe,
            on_hosted_call_done=metrics.hosted_call_seconds.observe,
        )
        self._migrations = Migrations(
            runtime,
            settings,
            engine.migrations,
            roster,
            metrics,
            engine.hosting.hosted,
            transport,
            self._calls,
            fingerprint=self._fingerprint,
            slot_bytes=block_shape_of(model, settings.block_size).num_bytes // model.config.num_kv_heads,
            max_model_len=max_model_len_of(settings, model),
        )
        engine.migrations.listen(self._migrations.placement_changed)
        metrics.watch(
            engine.hosting.hosted,
            epoch=lambda: engine.migrations.placement.epoch,
            num_away=lambda: len(engine.migrations.placement.placed),
        )
        self._server: HostingServer | None = None

    @property
    def address(self) -> str:
        """Where owners come to, for presence; empty where this worker hosts nothing."""
        return self._server.address if self._server is not None else ""

    @property
    def calls_address(self) -> str:
        """Where their calls come to, for presence."""
        return self._calls.address

    @property
    def num_links(self) -> int:
        """Open ones of those that carry calls alone, for the gauge."""
        return self._calls.num_open_links() if self._transport.spans_loops else 0

    async def open(self) -> None:
        """Once the engine has started: accept owners and orders."""
        if self._settings.hosting:
            await self._calls.listen(self._settings.link_host)
            self._runtime.spawn("guests-calls", self._calls.accept(self._engine.hosting))
            self._server = HostingServer(
                await self._transport.listen(self._settings.link_host),
                self._engine.hosting,
                self._form,
                self._runtime.spawn,
                self._migrations.hosting_changed,
                fingerprint=self._fingerprint,
                lease_seconds=self._settings.lease_seconds,
                send_timeout_seconds=self._settings.hosting_timeout_seconds,
            )
            self._runtime.spawn("guests", self._server.run())
        await self._migrations.open()

    def roster_changed(self, change: RosterChange) -> None:
        """Hosts may be gone. Owners are not asked after: they renew their leases over their Links."""
        for departed in change.departed:
            if departed.kind in (ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER):
                self._migrations.host_departed(departed.incarnation)

    async def drain(self, own_work: Awaitable[object]) -> None:
        """Take no more orders. Returns when `own_work` has ended and nothing of owners is left here.

        Owners take their modules owner, or have ended their own work. Own modules are let go with the own
        work: of two workers that host for each other and drain at once, each would wait for the other.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._migrations.drain())
            if self._server is not None:
                tasks.create_task(self._server.drain())
            await own_work
            await self._migrations.let_go()

    async def close(self) -> None:
        """Accept no more orders and owners. Links for calls end now, the others with the transport."""
        await self._migrations.close()
        if self._server is not None:
            await self._server.close()
        await self._calls.close()
