"""The decode worker on the bus: takes reservations, follows the roster, ends what nobody comes for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

import msgspec

from libs.bus.messages.generation import Abort, Refused, Reserve, Reserved
from libs.bus.messages.presence import ServiceKind, ServiceState
from libs.bus.subscriptions import Subscription
from libs.cost.load import WorkerLoad
from libs.engine.engine import Engine
from libs.kv.tensors import BlockShape
from libs.model.model import Model
from libs.request.outcome import RefusalReason
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from libs.transport.port import Listener, Transport
from libs.worker.device_events import DeviceEvents
from libs.worker.gauges import WorkerGauges
from libs.worker.migration.modules import Modules
from libs.worker.role_flip import RoleFlip, runs_both
from libs.worker.settings import WorkerSettings
from libs.worker.startup import (
    block_shape_of,
    describe_instance,
    engine_settings_of,
    open_model,
    open_transport,
)
from libs.worker.store_access import StoreAccess
from libs.worker.token_sender import TokenSender
from services.decode_worker.decoding import Decoding
from services.decode_worker.inlet import Inlet
from services.decode_worker.keeping import Keeping
from services.decode_worker.metrics import DecodeMetrics
from services.decode_worker.own_prompts import OwnPrompts
from services.decode_worker.sequences import Sequences, Stage
from services.decode_worker.settings import DecodeWorkerSettings


class DecodeWorkerService:
    """One decode worker. `open_model` and `open_transport` are the parts that a test replaces."""

    def __init__(
        self,
        settings: DecodeWorkerSettings,
        *,
        open_model: Callable[[WorkerSettings, Runtime], Awaitable[Model]] = open_model,
        open_transport: Callable[[WorkerSettings, Runtime], Transport] = open_transport,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._open_model, self._open_transport = settings, open_model, open_transport
        self._clock = clock
        self._sequences = Sequences(settings.lease_seconds)
        self._roster = Roster()
        self._subscriptions: list[Subscription] = []
        self._transport: Transport | None = None
        self._listener: Listener | None = None
        self._engine: Engine | None = None
        self._events: DeviceEvents | None = None
        self._modules: Modules | None = None

    async def open(self, runtime: Runtime) -> None:
        """Load the model, start the engine, listen for prefill workers and for reservations."""
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
        self._listener = await self._transport.listen(self._settings.link_host)
        shape = block_shape_of(model, self._settings.block_size)
        runtime.spawn("engine", self._engine.watch())
        runtime.spawn("tokens", self._tokens.run())
        runtime.spawn("leases", self._keep_time())
        runtime.spawn("accept", self._accept(self._listener, shape))
        watching = watch_roster(runtime.bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)
        self._subscriptions.append(await runtime.bus.serve(Reserve, self._reserve, at=runtime.incarnation))
        self._subscriptions.append(await runtime.bus.subscribe(Abort, self._abort, at=runtime.incarnation))
        self._subscriptions.append(await self._role_flip(runtime, modules).serve())
        await modules.open()
        describe_instance(
            runtime,
            self._settings,
            model,
            link_address=self._listener.address,
            hosting_address=modules.address,
            calls_address=modules.calls_address,
            runs_prompts=self._settings.role == "both",
            # One batch that runs and one that awaits its KV; more would hold blocks and do nothing.
            num_seats=min(self._settings.max_held, 2 * self._settings.max_num_seqs),
        )

    async def drain(self) -> None:
        """Refuse reservations; return when the last sequence has ended and its tokens are sent, and modules
        of others are home again."""
        self._decoding.is_draining = True
        if self._modules is not None:
            await self._modules.drain(self._sequences_ended())
        await self._tokens.wait_sent()

    async def close(self) -> None:
        """Stop listening, cut the Links, stop the engine."""
        for subscription in self._subscriptions:
            await subscription.close()
        if self._modules is not None:
            await self._modules.close()
        if self._events is not None:
            await self._events.close()
        if self._listener is not None:
            await self._listener.close()
        if self._transport is not None:
            await self._transport.close()
        if self._engine is not None:
            await self._engine.close()

    def load(self) -> WorkerLoad:
        """The engine's figures. What is not running is awaited, or waits its turn."""
        load = self._running_engine.load()
        num_awaited = len(self._sequences) - self._sequences.num_in(Stage.RUNNING)
        return msgspec.structs.replace(
            load,
            num_reserved=num_awaited,
            fetch_cost=self._access.stores.fetch_cost if self._settings.role == "both" else None,
            num_waiting=max(0, len(self._sequences) - num_awaited - load.num_running),
            mean_output_tokens=self._decoding.answer_lengths.mean_tokens,
            recent_request_ids=self._decoding.recent.ids(self._clock()),
            ended_request_ids=self._decoding.recently_ended.ids(self._clock()),
        )

    async def _sequences_ended(self) -> None:
        while len(self._sequences):
            self._decoding.ended.clear()
            await self._decoding.ended.wait()

    def _role_flip(self, runtime: Runtime, modules: Modules) -> RoleFlip:
        return RoleFlip(
            runtime,
            self._settings,
            ServiceKind.PREFILL_WORKER,
            denial=lambda: runs_both(self._settings.role) or modules.denial(),
        )

    @property
    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the engine starts before anything is asked of it")
        return self._engine

    async def _start(self, runtime: Runtime, model: Model, transport: Transport) -> Engine:
        """Everything between the bus and the engine, and the engine itself."""
        settings = self._settings
        self._metrics = DecodeMetrics(runtime.registry)
        self._tokens = TokenSender(runtime.bus, runtime.incarnation, settings.max_unsent_deltas)
        self._decoding = Decoding(
            self._sequences,
            self._metrics,
            self._tokens.send,
            block_size=settings.block_size,
            num_layers=model.config.num_layers,
            max_held=settings.max_held,
            clock=self._clock,
        )
        engine = Engine(model, engine_settings_of(settings, model), home=runtime.incarnation)
        self._access = StoreAccess(runtime, transport, settings, model, engine, self._metrics.transfer_bytes)
        keeping = Keeping(
            engine,
            self._access.stores,
            self._metrics.not_kept,
            fingerprint=model.fingerprint,
            block_size=settings.block_size,
        )
        self._events = DeviceEvents(runtime, engine)
        own = OwnPrompts(self._decoding, engine, self._access.prefixes, block_size=settings.block_size)
        self._decoding.attach(
            engine,
            on_names=self._events.tell,
            on_finished=keeping.finished if settings.store_finished else None,
            run_prompt=lambda held, num_here: runtime.spawn("own-prompt", own.run(held, num_here)),
        )
        WorkerGauges(runtime.registry).watch(
            engine,
            self.load,
            num_held=lambda: len(self._sequences),
            num_links=lambda: transport.num_open_links() + (self._modules.num_links if self._modules else 0),
            num_unsent_deltas=lambda: self._tokens.outbox.num_deltas,
        )
        await engine.start(self._decoding)
        await self._events.open()
        runtime.spawn("keeping", keeping.run())
        return engine

    async def _reserve(self, request: Reserve) -> Reserved | Refused:
        if not request.prefill and self._settings.role != "both":
            detail = "this decode worker runs no prompts; start it with --role both"
            return Refused(reason=RefusalReason.NO_WORKERS, detail=detail)
        answer = await self._decoding.reserve(request, self._runtime.presence.link_address)
        self._runtime.load_changed()
        return answer

    def _abort(self, message: Abort) -> None:
        self._decoding.abort(message.request_id)
        self._runtime.load_changed()

    async def _accept(self, listener: Listener, shape: BlockShape) -> NoReturn:
        while True:
            inlet = Inlet(await listener.accept(), self._decoding, shape, self._metrics)
            self._runtime.spawn("inlet", inlet.serve())

    async def _keep_time(self) -> NoReturn:
        """Leases and deadlines pass without a message."""
        came = self._decoding.came
        while True:
            came.clear()
            wake_at = self._sequences.next_expiry()
            try:
                async with asyncio.timeout(
                    None if wake_at == float("inf") else max(0.0, wake_at - self._clock())
                ):
                    await came.wait()
            except TimeoutError:
                self._decoding.expire()

    def _roster_changed(self, change: RosterChange) -> None:
        if self._modules is not None:
            self._modules.roster_changed(change)
        for departed in change.departed:
            if departed.kind is ServiceKind.GATEWAY:
                self._decoding.gateway_gone(departed.incarnation)
                self._tokens.outbox.forget(departed.incarnation)
            elif departed.kind is ServiceKind.PREFILL_WORKER:
                self._decoding.peer_left(
                    departed.incarnation,
                    f"{departed.name} left the mesh",
                    is_drained=departed.state is ServiceState.DRAINING,
                )
        if self._settings.store_finished or self._settings.role == "both":
            self._access.stores.set_stores(self._roster.ready(ServiceKind.KV_STORE))
