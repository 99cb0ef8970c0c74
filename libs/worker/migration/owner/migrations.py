"""Migrations of own modules: takes orders, carries them out one at a time, follows what hosts do."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import structlog

from libs.bus.messages.migration import (
    CancelMigration,
    DenialReason,
    MigrationAccepted,
    MigrationDenied,
    MigrationRecord,
    PlacementUpdate,
    StartMigration,
)
from libs.bus.subscriptions import Subscription
from libs.engine.errors import EngineClosed, EngineError
from libs.engine.hosting.port import HostLost
from libs.engine.migration.live_migration import LiveMigration
from libs.placement.migration import MigrationPhase, is_over
from libs.placement.module import Module, ModuleKind
from libs.placement.placement import HostedModuleStatus, PlacedModule, Placement
from libs.runtime.roster import Roster
from libs.runtime.runtime import Runtime
from libs.transport.port import Transport
from libs.worker.migration.call_links import CallLinks
from libs.worker.migration.metrics import MigrationMetrics
from libs.worker.migration.owner.connections import HostConnections
from libs.worker.migration.owner.directions import Direction, Inbound, Outbound
from libs.worker.migration.owner.migration import Migration, Pace
from libs.worker.migration.owner.orders import MigrationRejected, OrderContext, placed_by
from libs.worker.migration.owner.remote_host import RemoteHost
from libs.worker.migration.owner.updates import PlacementPublisher
from libs.worker.settings import WorkerSettings

MIB = 1 << 20
_MAX_RECORDS = 64
"""Of moves that ended; an order that comes twice is known by them."""
_NUM_PUBLISHED = 8
_PINGS_PER_LEASE = 3
_DEPARTED_SECONDS = 1.0
"""What a host that left the mesh may take to say that it is there all the same."""

log = structlog.get_logger()


class Migrations:
    """One per worker."""

    def __init__(
        self,
        runtime: Runtime,
        settings: WorkerSettings,
        engine: LiveMigration,
        roster: Roster,
        metrics: MigrationMetrics,
        hosted: Callable[[], tuple[HostedModuleStatus, ...]],
        transport: Transport,
        calls: CallLinks,
        *,
        fingerprint: str,
        slot_bytes: int,
        max_model_len: int,
    ) -> None:
        self._runtime, self._settings, self._engine, self._roster = runtime, settings, engine, roster
        self._metrics, self._hosted = metrics, hosted
        self._fingerprint, self._slot_bytes, self._max_model_len = fingerprint, slot_bytes, max_model_len
        self._links = HostConnections(
            transport,
            calls,
            roster,
            runtime.spawn,
            self.host_lost,
            self.host_leaving,
            fingerprint=fingerprint,
            timeout_seconds=settings.hosting_timeout_seconds,
            ping_seconds=settings.lease_seconds / _PINGS_PER_LEASE,
        )
        self._publisher = PlacementPublisher(runtime.bus, self._update)
        self._records: OrderedDict[str, MigrationRecord] = OrderedDict()
        self._counted = engine.placement, engine.num_total_blocks
        """The last placement of which it is known how many blocks the pool has under it."""
        self._move: Migration | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._leaving: set[str] = set()
        self._ids = count(1)
        self._subscriptions: list[Subscription] = []
        self.is_draining = self._has_let_go = False

    @property
    def busy_with(self) -> str:
        """The move that is under way, or nothing."""
        return self._move.record.move_id if self._move is not None else ""

    async def open(self) -> None:
        """Take orders from now on."""
        bus, at = self._runtime.bus, self._runtime.incarnation
        self._subscriptions.append(await bus.serve(StartMigration, self.start, at=at))
        self._subscriptions.append(await bus.serve(CancelMigration, self.abandon, at=at))
        self._runtime.spawn("placement", self._publisher.run())

    async def drain(self) -> None:
        """Take no more orders; returns when no move is under way."""
        self.is_draining = True
        if self._move is not None:
            self._move.abandon("its home is about to end")
        await self._idle()

    async def let_go(self) -> None:
        """Drain; nothing of this instance runs any more, and hosts need not keep what they have of it."""
        await self.drain()
        self._has_let_go = True
        for worker in self._links.workers():
            log.info("host_let_go", host=worker, num_modules=len(self._at(worker)))
            self._links.drop(worker, "nothing of this instance runs any more")
        self._publisher.changed()

    async def close(self) -> None:
        """Take no more orders."""
        for subscription in self._subscriptions:
            await subscription.close()

    async def start(self, order: StartMigration) -> MigrationAccepted | MigrationDenied:
        """Answers StartMigration."""
        epoch = self._engine.placement.epoch
        if order.move_id in self._records:
            return MigrationAccepted(move_id=order.move_id, epoch=epoch)
        context = OrderContext(
            placement=self._engine.placement,
            fingerprint=self._fingerprint,
            busy_with=self.busy_with,
            is_draining=self.is_draining,
        )
        try:
            placed = placed_by(order, context, self._roster.get(order.host))
        except MigrationRejected as refused:
            log.info("move_refused", move_id=order.move_id, reason=str(refused))
            return refused.answer
        self._begin(order, placed)
        return MigrationAccepted(move_id=order.move_id, epoch=epoch)

    async def abandon(self, order: CancelMigration) -> MigrationAccepted | MigrationDenied:
        """Answers CancelMigration."""
        epoch = self._engine.placement.epoch
        if order.move_id not in self._records:
            detail = f"no move {order.move_id!r} was begun here"
            return MigrationDenied(reason=DenialReason.NOT_FOUND, detail=detail, epoch=epoch)
        move = self._move
        if (
            move is not None
            and move.record.move_id == order.move_id
            and move.abandon("it was cancelled")
            and await move.is_rolled_back()
        ):
            return MigrationAccepted(move_id=order.move_id, epoch=epoch)
        return self._cannot_roll_back(order.move_id)

    def _cannot_roll_back(self, move_id: str) -> MigrationDenied:
        phase = self._records[move_id].phase
        said = f"is {phase.value}: it cannot be rolled back any more"
        if phase is MigrationPhase.ROLLING_BACK:
            said = "is being rolled back already"
        epoch = self._engine.placement.epoch
        return MigrationDenied(reason=DenialReason.INVALID, detail=f"move {move_id!r} {said}", epoch=epoch)

    def placement_changed(self, placement: Placement, lost: str) -> None:
        """The engine's, from now on; `lost` says which host was lost, and why."""
        if lost:
            log.warning("host_lost", reason=lost, epoch=placement.epoch)
            self._metrics.hosts_lost.inc()
        self._publisher.changed()
        self._runtime.spawn("count-blocks", self._count_when_changed())
        self._drop_unused()

    async def _count_when_changed(self) -> None:
        """The engine's thread is still at what changed the placement, and its figures are from before: they
        are of this placement once it has taken the next order, be it to cancel nothing."""
        with suppress(EngineError):  # it ends, or is overrun; the placement has to be told all the same
            await self._engine.cancel_move("")
        self._count_blocks()

    def _count_blocks(self) -> None:
        """The engine's figures are of the placement that it has."""
        self._counted = self._engine.placement, self._engine.num_total_blocks
        self._publisher.changed()

    def hosting_changed(self) -> None:
        """A module of another instance came here or left."""
        self._publisher.changed()

    def host_lost(self, worker: str, why: str) -> None:
        """Its Link is over, or it left the mesh."""
        self._leaving.discard(worker)
        move = self._move
        is_moving = move is not None and move.record.host == worker
        if move is not None and is_moving:
            move.abandon(f"its host was lost: {why}")
        if is_moving or self._at(worker):
            self._runtime.spawn("lose-host", self._lose(worker, why))

    async def _lose(self, worker: str, why: str) -> None:
        with suppress(EngineClosed):  # there is nothing to go on with
            await self._engine.lose_host(worker, why)

    def host_departed(self, worker: str) -> None:
        """It left the mesh, or only its way to the broker is cut: then it answers over its Link."""
        if (link := self._links.get(worker)) is not None:
            self._runtime.spawn("ask-host", self._ask_after(link))

    async def _ask_after(self, link: RemoteHost) -> None:
        try:
            async with asyncio.timeout(_DEPARTED_SECONDS):
                await link.ping()
        except (TimeoutError, HostLost):
            if self._links.get(link.worker) is link:
                self._give_up(link.worker, "it left the mesh")

    def host_leaving(self, worker: str) -> None:
        """It asks for its modules to be taken back."""
        if worker not in self._leaving and not self.is_draining:
            self._leaving.add(worker)
            self._runtime.spawn("take-back", self._take_back(worker))

    async def _take_back(self, worker: str) -> None:
        if self._move is not None and self._move.record.host == worker and not self._move.record.is_return:
            self._move.abandon("its host is leaving")
        while True:
            await self._idle()
            at_host = self._at(worker)
            if not at_host or self.is_draining:
                break
            order = StartMigration(
                move_id=f"leave-{self._runtime.incarnation}-{next(self._ids)}",
                returned_move_id=at_host[0].move_id,
                expected_epoch=self._engine.placement.epoch,
                deadline_seconds=self._settings.move_deadline_seconds,
                reason="its host is leaving",
            )
            self._begin(order, at_host[0])
            await self._is_idle.wait()
            if self._records[order.move_id].phase is MigrationPhase.FAILED:
                self._give_up_if_idle(worker)
                break
        self._leaving.discard(worker)

    def _give_up(self, worker: str, why: str) -> None:
        self.host_lost(worker, why)
        self._links.drop(worker, why)

    def _give_up_if_idle(self, worker: str) -> None:
        """Of a host that leaves, whose modules cannot be brought back: where no sequence needs them, it need
        not wait until its drain is cut short."""
        is_idle = self._engine.num_free_blocks == self._engine.num_total_blocks
        if is_idle and not self.is_draining and self._links.get(worker) is not None:
            self._give_up(worker, "its modules could not be brought home before it left")

    async def _idle(self) -> None:
        """No move is under way, and the caller may begin one at once: of several that waited, one did."""
        while self._move is not None:
            await self._is_idle.wait()

    def _begin(self, order: StartMigration, placed: PlacedModule) -> None:
        host = self._roster.get(placed.worker)
        move = Migration(
            MigrationRecord(
                move_id=order.move_id,
                instance=self._runtime.incarnation,
                instance_name=self._runtime.identity.name,
                host=placed.worker,
                host_name=host.name if host is not None else "",
                module=placed.module,
                is_return=order.module is None,
                returned_move_id=order.returned_move_id,
                with_weights=not placed.has_weights_at_owner,
                phase=MigrationPhase.PLANNED,
                expected_epoch=order.expected_epoch,
                epoch=self._engine.placement.epoch,
                reason=order.reason,
                started_unix_seconds=time.time(),
                num_blocks_before=self._engine.num_total_blocks,
            ),
            self._engine,
            self._direction(order, placed),
            Pace(self._settings.move_bandwidth_mib * MIB),
            self._changed,
            module_move_id=placed.move_id,
            block_bytes=self._block_bytes(placed.module),
            deadline_seconds=order.deadline_seconds,
        )
        self._move = move
        self._is_idle.clear()
        self._changed(move.record)
        self._runtime.spawn("move", self._run(move))

    async def _run(self, move: Migration) -> None:
        try:
            await move.run()
        finally:
            self._move = None
            self._is_idle.set()
            self._drop_unused()
            self._publisher.changed()
        self._metrics.ended(move.record)

    def _direction(self, order: StartMigration, placed: PlacedModule) -> Direction:
        if order.module is None:
            return Inbound(self._engine, partial(self._links.get, placed.worker), placed)
        total = self._engine.num_total_blocks
        if placed.module.kind is ModuleKind.TOKENS:
            least = order.num_blocks or 1
        elif not order.num_blocks:
            least = total  # an owner does not lose blocks unless whoever ordered it said how many are enough
        else:
            block_size = self._settings.block_size
            one_sequence = min(total, -(-self._max_model_len // block_size))
            least = max(one_sequence, total - self._engine.num_free_blocks)
        return Outbound(
            self._engine,
            partial(self._links.connect, placed.worker),
            placed,
            num_blocks_least=least,
        )

    def _changed(self, record: MigrationRecord) -> None:
        if record.phase is MigrationPhase.RELEASING:  # it has switched, and the engine has said so
            self._count_blocks()
        self._records[record.move_id] = record
        while len(self._records) > _MAX_RECORDS:
            self._records.popitem(last=False)
        self._publisher.moved(record)

    def _update(self) -> PlacementUpdate:
        if self._move is not None:  # its record says more than at its last change of phase
            self._records[self._move.record.move_id] = self._move.record
        records = list(self._records.values())
        under_way = [one for one in records if not is_over(one.phase)]
        ended = [one for one in records if is_over(one.phase)][-_NUM_PUBLISHED:]
        is_switching = self._move is not None and self._move.record.phase is MigrationPhase.SWITCHING
        is_counted = self._counted[0].epoch == self._engine.placement.epoch
        if is_counted and not is_switching:  # owners take and give back blocks, too
            self._counted = self._engine.placement, self._engine.num_total_blocks
        placement, num_blocks = self._counted
        if not (is_counted or is_switching):  # a host was lost, which others have to know at once
            placement, num_blocks = self._engine.placement, 0
        if self._has_let_go:  # hosts tell that they have nothing of it
            for worker in {one.worker for one in placement.placed}:
                placement = placement.without_worker(worker)
        return PlacementUpdate(
            placement=placement, num_blocks=num_blocks, hosted=self._hosted(), moves=(*under_way, *ended)
        )

    def _drop_unused(self) -> None:
        """Links to hosts where nothing of this instance is, or is about to be."""
        used = {one.worker for one in self._engine.placement.placed}
        if self._move is not None:
            used.add(self._move.record.host)
        for worker in self._links.workers() - used:
            self._links.drop(worker, "no module is there")

    def _at(self, worker: str) -> list[PlacedModule]:
        return [one for one in self._engine.placement.placed if one.worker == worker]

    def _block_bytes(self, module: Module) -> int:
        return len(module.slots(self._engine.placement.num_kv_heads)) * self._slot_bytes
