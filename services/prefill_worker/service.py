"""The prefill worker on the bus: takes prompts, follows the roster, keeps leases alive."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import msgspec

from libs.bus.messages.generation import Abort, Prefill, Queued, Refused
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.bus.subscriptions import Subscription
from libs.cost.load import WorkerLoad
from libs.engine.engine import Engine
from libs.model.model import Model
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from libs.transport.port import Transport
from libs.worker.device_events import DeviceEvents
from libs.worker.gauges import WorkerGauges
from libs.worker.migration.modules import Modules
from libs.worker.role_flip import RoleFlip
from libs.worker.settings import WorkerSettings
from libs.worker.startup import (
    describe_instance,
    engine_settings_of,
    max_model_len_of,
    open_model,
    open_transport,
)
from libs.worker.store_access import StoreAccess
from libs.worker.token_sender import TokenSender
from services.prefill_worker.metrics import PrefillMetrics
from services.prefill_worker.outlets import Outlets
from services.prefill_worker.prefilling import Prefilling
from services.prefill_worker.settings import PrefillWorkerSettings
from services.prefill_worker.waiting_work import WaitingWork

RENEWALS_PER_LEASE = 3


class PrefillWorkerService:
    """One prefill worker. `open_model` and `open_transport` are the parts that a test replaces."""

    def __init__(
        self,
        settings: PrefillWorkerSettings,
        *,
        open_model: Callable[[WorkerSettings, Runtime], Awaitable[Model]] = open_model,
        open_transport: Callable[[WorkerSettings, Runtime], Transport] = open_transport,
    ) -> None:
        self._settings, self._open_model, self._open_transport = settings, open_model, open_transport
        self._roster = Roster()
        self._subscriptions: list[Subscription] = []
        self._transport: Transport | None = None
        self._engine: Engine | None = None
        self._events: DeviceEvents | None = None
        self._modules: Modules | None = None

    async def open(self, runtime: Runtime) -> None:
        """Load the model, start the engine, listen for prompts."""
        self._runtime = runtime
        self._transport = self._open_transport(self._settings, runtime)
        model = await self._open_model(self._settings, runtime)
        runtime.progress("making room for KV")
        self._engine = await self._start(runtime, model, self._transport)
        self._modules = modules = Modules(
            runtime,
            self._transport,
            self._settings,
            model,
            self._engine,
            self._roster,
            open_transport=lambda: self._open_transport(self._settings, runtime),
        )
        runtime.spawn("engine", self._engine.watch())
        runtime.spawn("tokens", self._tokens.run())
        runtime.spawn("leases", self._renew_leases())
        self._subscriptions.append(await runtime.bus.serve(Prefill, self._prefill, at=runtime.incarnation))
        self._subscriptions.append(await runtime.bus.subscribe(Abort, self._abort, at=runtime.incarnation))
        role_flip = RoleFlip(runtime, self._settings, ServiceKind.DECODE_WORKER, denial=modules.denial)
        self._subscriptions.append(await role_flip.serve())
        await modules.open()
        describe_instance(
            runtime,
            self._settings,
            model,
            hosting_address=modules.address,
            calls_address=modules.calls_address,
            num_seats=self._settings.max_waiting,
        )
        watching = watch_roster(runtime.bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)

    async def drain(self) -> None:
        """Take no more prompts; return when those here are handed over, and modules of others are home
        again."""
        self._prefilling.is_draining = True
        if self._modules is not None:
            await self._modules.drain(self._prefilling.prompts.emptied.wait())
        await self._tokens.wait_sent()

    async def close(self) -> None:
        """Stop listening, cut the Links, stop the engine."""
        for subscription in self._subscriptions:
            await subscription.close()
        if self._modules is not None:
            await self._modules.close()
        if self._events is not None:
            await self._events.close()
        if self._transport is not None:
            await self._transport.close()
        if self._engine is not None:
            await self._engine.close()

    def load(self) -> WorkerLoad:
        """The engine's figures, and the prompts that it does not know of yet."""
        engine, prefilling, settings = self._running_engine, self._prefilling, self._settings
        load, waiting = engine.load(), WaitingWork(prefilling.prompts, settings.block_size)
        waiting_seconds = waiting.seconds(engine.prefill_cost(), settings.max_num_batched_tokens)
        return msgspec.structs.replace(
            load,
            num_waiting=max(0, len(prefilling.prompts) - load.num_running),
            num_reserved=0,
            num_waiting_tokens=load.num_waiting_tokens + waiting.num_tokens,
            queued_seconds=load.queued_seconds + waiting_seconds,
            fetch_cost=self._access.stores.fetch_cost,
            recent_request_ids=prefilling.recent.ids(time.time()),
        )

    @property
    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine starts before anything is asked of it")
        return self._engine

    async def _start(self, runtime: Runtime, model: Model, transport: Transport) -> Engine:
        """Everything between the bus and the engine, and the engine itself."""
        settings = self._settings
        metrics = PrefillMetrics(runtime.registry)
        self._tokens = TokenSender(runtime.bus, runtime.incarnation, settings.max_unsent_deltas)
        self._prefilling = prefilling = Prefilling(
            metrics,
            runtime.spawn,
            self._tokens.send,
            block_size=settings.block_size,
            max_waiting=settings.max_waiting,
        )
        engine = Engine(model, engine_settings_of(settings, model), home=runtime.incarnation)
        self._outlets = Outlets(
            transport,
            runtime.spawn,
            engine.release_layer,
            prefilling.outlet_lost,
            metrics,
            num_layers=model.config.num_layers,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            send_timeout_seconds=settings.send_timeout_seconds,
        )
        self._access = access = StoreAccess(
            runtime, transport, settings, model, engine, metrics.transfer_bytes
        )
        self._events = DeviceEvents(runtime, engine)
        prefilling.attach(engine, self._outlets, access.prefixes, access.puts, self._events)
        WorkerGauges(runtime.registry).watch(
            engine,
            self.load,
            num_held=lambda: len(prefilling.prompts),
            num_links=lambda: transport.num_open_links() + (self._modules.num_links if self._modules else 0),
            num_unsent_deltas=lambda: self._tokens.outbox.num_deltas,
        )
        await engine.start(prefilling)
        pool_tokens = engine.num_total_blocks * settings.block_size
        prefilling.limit_tokens(min(max_model_len_of(settings, model), pool_tokens))
        await self._events.open()
        return engine

    async def _prefill(self, request: Prefill) -> Queued | Refused:
        answer = self._prefilling.take(request)
        self._runtime.load_changed()
        return answer

    def _abort(self, message: Abort) -> None:
        self._prefilling.abort(message.request_id)

    async def _renew_leases(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._settings.lease_seconds / RENEWALS_PER_LEASE)
            await self._outlets.renew(self._prefilling.prompts.by_decode())

    def _roster_changed(self, change: RosterChange) -> None:
        if self._modules is not None:
            self._modules.roster_changed(change)
        for departed in change.departed:
            if departed.kind is ServiceKind.GATEWAY:
                self._prefilling.gateway_gone(departed.incarnation)
            elif departed.kind is ServiceKind.DECODE_WORKER:
                self._outlets.forget(departed.incarnation)
        for presence in (*change.arrived, *change.updated):
            if self._may_send_to(presence):
                greeting = self._outlets.greet(presence.incarnation, presence.link_address)
                self._runtime.spawn("greet", greeting)
        self._access.stores.set_stores(self._roster.ready(ServiceKind.KV_STORE))

    def _may_send_to(self, presence: Presence) -> bool:
        return (
            presence.kind is ServiceKind.DECODE_WORKER
            and presence.state is ServiceState.READY
            and presence.link_address != ""
            and presence.model_fingerprint == self._runtime.presence.model_fingerprint
        )
