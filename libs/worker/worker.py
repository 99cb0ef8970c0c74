"""One worker: a model, an engine, and what its role lets it do for others."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NoReturn

import msgspec

from libs.bus.messages.generation import Abort, Prefill, Queued, Refused, Reserve, Reserved
from libs.bus.messages.migration import ChangeRole
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.engine.engine import Engine
from libs.engine.outputs import SequenceFailed
from libs.kv.tensors import BlockShape
from libs.model.model import Model
from libs.placement.role import Role
from libs.request.outcome import RefusalReason
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from libs.transport.port import Listener, Transport
from libs.worker.admission import Admission
from libs.worker.decode.decode_requests import DecodeRequests
from libs.worker.decode.finished_kv import FinishedKvUploads
from libs.worker.decode.kv_receiver import KvReceiver
from libs.worker.decode.sequences import Stage
from libs.worker.device_events import DeviceEvents
from libs.worker.engine_events import EngineEvents
from libs.worker.metrics import WorkerMetrics, watch_worker
from libs.worker.migration.modules import Modules
from libs.worker.prefill.block_queue import BlockQueue
from libs.worker.prefill.kv_senders import KvSenders
from libs.worker.prefill.prefill_requests import PrefillRequests
from libs.worker.prefill.prompt_runs import PromptRuns
from libs.worker.role_changes import RoleChanges
from libs.worker.settings import WorkerSettings
from libs.worker.startup import (
    block_shape_of,
    describe_instance,
    engine_settings_of,
    max_sequence_len_of,
    open_model,
    open_transport,
)
from libs.worker.stores.store_access import StoreAccess
from libs.worker.token_sender import TokenSender

RENEWALS_PER_LEASE = 3

_KINDS = {
    Role.PREFILL: ServiceKind.PREFILL_WORKER,
    Role.DECODE: ServiceKind.DECODE_WORKER,
    Role.BOTH: ServiceKind.DECODE_WORKER,
}
"""What others see; of `both` they see `runs_prompts` besides."""


class Worker:
    """The service. `open_model`, `open_transport` and `clock` (unix seconds) are what a test replaces."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        open_model: Callable[[WorkerSettings, Runtime], Awaitable[Model]] = open_model,
        open_transport: Callable[[WorkerSettings, Runtime], Transport] = open_transport,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._open_model, self._open_transport = settings, open_model, open_transport
        self._clock = clock
        self._role = Role(settings.role)
        self._roster, self._admission = Roster(), Admission(clock)
        self._closing = AsyncExitStack()

    async def open(self, runtime: Runtime) -> None:
        """Load the model, start the engine, listen for requests and for prefill workers."""
        settings, self._runtime = self._settings, runtime
        transport = self._open_transport(settings, runtime)
        self._closing.push_async_callback(transport.close)
        model = await self._open_model(settings, runtime)
        runtime.progress("making room for KV")
        self.engine = engine = Engine(model, engine_settings_of(settings, model), home=runtime.incarnation)
        self._closing.push_async_callback(engine.close)
        # Before the engine: a step of it that waits for another worker ends with the Link.
        self._closing.push_async_callback(transport.close)
        self._compose(runtime, model, transport)
        self._compose_operations(runtime, model, transport)
        await engine.start(
            EngineEvents(
                on_tokens=self.decode.on_tokens,
                on_layer=self._prefill.on_layer,
                on_prompt_done=self._prefill.on_prompt_done,
                on_names=self._events.tell,
                on_failed=self._on_failed,
            )
        )
        await self._events.open()
        self._closing.push_async_callback(self._events.close)
        self._closing.push_async_callback(self.modules.close)
        listener = await transport.listen(settings.link_host)
        self._link_address = listener.address
        self._closing.push_async_callback(listener.close)
        self._spawn_tasks(listener, block_shape_of(model, settings.block_size))
        await self._serve()
        await self.modules.open()
        describe_instance(
            runtime,
            settings,
            model,
            hosting_address=self.modules.address,
            calls_address=self.modules.calls_address,
        )
        self._describe_role()
        watching = watch_roster(runtime.bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)

    async def drain(self) -> None:
        """Take no requests; return when the last one has ended and its tokens are sent, and modules of others
        are home again."""
        self._role_changes.cancel()
        self._admission.draining = "this worker is shutting down"
        await self.modules.drain(self._requests_ended())
        await self._tokens.wait_sent()

    async def close(self) -> None:
        """Stop listening, cut the Links, stop the engine."""
        await self._closing.aclose()

    def load(self) -> WorkerLoad:
        """The engine's figures, and what it does not know of yet."""
        engine, sequences = self.engine, self.decode.sequences
        load, waiting = engine.load(), self._runs.waiting_work()
        waiting_seconds = waiting.seconds(engine.prefill_cost(), self._settings.max_num_batched_tokens)
        num_awaited = len(sequences) - sequences.num_in(Stage.RUNNING)
        return msgspec.structs.replace(
            load,
            num_reserved=num_awaited,
            num_waiting=max(0, self._num_held() - num_awaited - load.num_running),
            num_waiting_tokens=load.num_waiting_tokens + waiting.num_tokens,
            queued_seconds=load.queued_seconds + waiting_seconds,
            fetch_cost=self.stores.fetch_cost if self._role is not Role.DECODE else None,
            mean_output_tokens=self.decode.answer_lengths.mean_tokens,
            recent_request_ids=self._admission.recently_taken(),
            ended_request_ids=self._admission.recently_ended(),
        )

    # Parts

    def _compose(self, runtime: Runtime, model: Model, transport: Transport) -> None:
        """Everything around the engine, in the order in which one needs the other."""
        settings, engine = self._settings, self.engine
        self._metrics = metrics = WorkerMetrics(runtime.registry)
        self._tokens = TokenSender(runtime.bus, runtime.incarnation, settings.max_unsent_deltas)
        self._events = DeviceEvents(runtime, engine)
        access = StoreAccess(runtime, transport, settings, model, engine, metrics.transfer_bytes)
        self.stores = access.stores
        blocks = BlockQueue(engine)
        self._runs = PromptRuns(
            engine,
            blocks,
            access.prefixes,
            access.uploads,
            runtime.spawn,
            block_size=settings.block_size,
        )
        self._senders = KvSenders(
            transport, runtime.spawn, engine.release_layer, metrics, settings, model.config.num_layers
        )
        self._uploads = FinishedKvUploads(
            engine,
            self.stores,
            metrics.not_kept,
            fingerprint=model.fingerprint,
            block_size=settings.block_size,
        )
        self._prefill = PrefillRequests(
            engine,
            self._runs,
            blocks,
            self._senders,
            self._admission,
            metrics,
            settings,
            runtime.spawn,
            self._tokens.send,
            max_tokens=max_sequence_len_of(settings, model),
            clock=self._clock,
        )
        self.decode = DecodeRequests(
            engine,
            self._runs,
            blocks,
            self._uploads,
            self._admission,
            metrics,
            settings,
            runtime.spawn,
            self._tokens.send,
            num_layers=model.config.num_layers,
            clock=self._clock,
        )

    def _compose_operations(self, runtime: Runtime, model: Model, transport: Transport) -> None:
        """What operators see and change: modules on other workers, the role, gauges."""
        settings = self._settings
        self.modules = Modules(
            runtime,
            transport,
            settings,
            model,
            self.engine,
            self._roster,
            open_transport=lambda: self._open_transport(settings, runtime),
        )
        self._role_changes = RoleChanges(
            runtime, self._admission, self._answers_sent, self._enter_role, self._role
        )
        watch_worker(
            runtime.registry,
            self.engine,
            self.load,
            num_held=self._num_held,
            num_links=lambda: transport.num_open_links() + self.modules.num_links,
            num_unsent_deltas=lambda: self._tokens.outbox.num_deltas,
        )

    def _spawn_tasks(self, listener: Listener, shape: BlockShape) -> None:
        spawn = self._runtime.spawn
        spawn("engine", self.engine.watch())
        spawn("tokens", self._tokens.run())
        spawn("finished-kv", self._uploads.run())
        spawn("renew-leases", self._renew_leases())
        spawn("expire", self._expire())
        spawn("accept", self._accept(listener, shape))

    async def _serve(self) -> None:
        bus, at = self._runtime.bus, self._runtime.incarnation
        for subscription in (
            await bus.serve(Prefill, self._on_prefill, at=at),
            await bus.serve(Reserve, self._on_reserve, at=at),
            await bus.subscribe(Abort, self._on_abort, at=at),
            await bus.serve(ChangeRole, self._role_changes.order, at=at),
        ):
            self._closing.push_async_callback(subscription.close)

    async def _accept(self, listener: Listener, shape: BlockShape) -> NoReturn:
        while True:
            receiver = KvReceiver(await listener.accept(), self.decode, self.engine, shape, self._metrics)
            self._runtime.spawn("kv-receiver", receiver.serve())

    async def _renew_leases(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._settings.lease_seconds / RENEWALS_PER_LEASE)
            await self._senders.renew()

    async def _expire(self) -> NoReturn:
        """Leases and deadlines pass without a message."""
        while True:
            await self.decode.wait_expiry()
            self.decode.expire()

    def _num_held(self) -> int:
        return len(self._prefill) + len(self.decode.sequences)

    async def _requests_ended(self) -> None:
        await self._prefill.wait_empty()
        await self.decode.wait_empty()

    async def _answers_sent(self) -> None:
        await self._requests_ended()
        await self._tokens.wait_sent()

    def _on_failed(self, failure: SequenceFailed) -> None:
        self._prefill.on_failed(failure)
        self.decode.on_failed(failure)

    # What gateways ask

    async def _on_prefill(self, request: Prefill) -> Queued | Refused:
        if self._role is Role.DECODE and not self._admission.draining:
            return _refused_by_role("a decode worker, and hands no prompts over")
        answer = self._prefill.take(request)
        self._runtime.load_changed()
        return answer

    async def _on_reserve(self, request: Reserve) -> Reserved | Refused:
        if self._role is Role.PREFILL and not self._admission.draining:
            return _refused_by_role("a prefill worker, and generates nothing")
        if not request.prefill and self._role is Role.DECODE and not self._admission.draining:
            return _refused_by_role("a decode worker, and runs no prompts; give it the role both")
        answer = await self.decode.reserve(request, self._link_address)
        self._runtime.load_changed()
        return answer

    def _on_abort(self, message: Abort) -> None:
        is_here = self._prefill.abort(message.request_id)
        is_here = self.decode.abort(message.request_id) or is_here
        if not is_here:
            self._admission.aborted_unknown(message.request_id)
        self._runtime.load_changed()

    # The mesh

    def _roster_changed(self, change: RosterChange) -> None:
        self.modules.roster_changed(change)
        for departed in change.departed:
            self._senders.forget(departed.incarnation)
            if departed.kind is ServiceKind.GATEWAY:
                self._prefill.gateway_gone(departed.incarnation)
                self.decode.gateway_gone(departed.incarnation)
                self._tokens.outbox.forget(departed.incarnation)
            else:
                self.decode.peer_left(
                    departed.incarnation,
                    f"{departed.name} left the mesh",
                    is_drained=departed.state is ServiceState.DRAINING,
                )
        self._connect_decode_workers((*change.arrived, *change.updated))
        self._use_stores()

    def _connect_decode_workers(self, workers: tuple[Presence, ...]) -> None:
        for presence in workers if self._role is Role.PREFILL else ():
            if (
                presence.kind is ServiceKind.DECODE_WORKER
                and presence.state is ServiceState.READY
                and presence.link_address
                and presence.model_fingerprint == self._runtime.presence.model_fingerprint
            ):
                connecting = self._senders.connect(presence.incarnation, presence.link_address)
                self._runtime.spawn("connect", connecting)

    def _use_stores(self) -> None:
        is_user = self._role is not Role.DECODE or self._settings.store_finished
        self.stores.set_stores(self._roster.ready(ServiceKind.KV_STORE) if is_user else [])

    # The role

    def _describe_role(self) -> None:
        """What others see of it."""
        settings, generates = self._settings, self._role is not Role.PREFILL
        # Of sequences one batch that runs and one that awaits its KV; more would hold blocks and do nothing.
        num_sequences = min(settings.max_held, 2 * settings.max_num_seqs)
        self._runtime.describe(
            kind=_KINDS[self._role],
            runs_prompts=self._role is Role.BOTH,
            link_address=self._link_address if generates else "",
            num_seats=num_sequences if generates else settings.max_waiting,
        )

    def _enter_role(self, role: Role) -> None:
        self._role = role
        self._metrics.role_changes.inc()
        self._describe_role()
        self._use_stores()
        self._connect_decode_workers(tuple(self._roster.all()))


def _refused_by_role(what: str) -> Refused:
    return Refused(reason=RefusalReason.NO_WORKERS, detail=f"this is {what}")
