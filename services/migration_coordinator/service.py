"""The migration coordinator on the bus: hears the workers, leads or stands by, orders and explains."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import structlog

from libs.balancing.decide import decide
from libs.balancing.state import LoopState, back_off
from libs.balancing.view import Flip, Inbound, Outbound, RoundReport
from libs.bus.errors import BusError, NotConnected, RequestTimedOut, Undecodable
from libs.bus.messages.migration import (
    CancelMigration,
    ChangeRole,
    DenialReason,
    ExplainRounds,
    MigrationDenied,
    MigrationRecord,
    MigrationUpdate,
    PlacementUpdate,
    Rounds,
    StartMigration,
)
from libs.bus.messages.presence import LoadReport
from libs.bus.subscriptions import Subscription
from libs.mesh.cluster_state import ClusterState
from libs.mesh.migrations import planned
from libs.placement.migration import MigrationPhase, is_automatic, new_move_id
from libs.placement.role import Role
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from services.migration_coordinator.devices import view_of
from services.migration_coordinator.metrics import CoordinatorMetrics
from services.migration_coordinator.rounds import RoundLog
from services.migration_coordinator.settings import CoordinatorSettings, balancing_of

LEASE = "migration-coordinator"
QUEUE_GROUP = "coordinators"
RENEWALS_PER_LEASE = 4
ORDER_TIMEOUT_SECONDS = 5.0
GRACE_SECONDS = 5.0
"""Beyond a migration's deadline, before it is asked to be abandoned."""

log = structlog.get_logger()


class Leadership:
    """Whether this coordinator leads, by the lease it was last given. Times are monotonic seconds; a
    connection has a number, another one after each reconnect.

    A lease is worth what the broker remembers, so losing the connection ends it here: the broker may have
    come back empty, and given it to somebody else.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._ends_at = float("-inf")
        self._connection = -1

    def answered(self, *, is_held: bool, asked_at: float, connection: int) -> None:
        """The broker's answer to a question of this time, before which its clock has not begun to run."""
        self._ends_at = asked_at + self._lease_seconds if is_held else float("-inf")
        self._connection = connection

    def end(self) -> None:
        """It is given back."""
        self._ends_at = float("-inf")

    def is_ours(self, now: float, connection: int) -> bool:
        """Nobody else has it now."""
        return now < self._ends_at and connection == self._connection


class CoordinatorService:
    """One coordinator. `clock` gives unix seconds."""

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self._balancing = balancing_of(settings)
        self._roster = Roster()
        self._cluster = ClusterState(self._roster)
        self._migrations = self._cluster.migrations
        self._abandoned: set[str] = set()
        self._rounds = RoundLog()
        self._state = LoopState()
        self._heard: list[Subscription] = []
        self._answering: Subscription | None = None
        self._is_draining = False

    async def open(self, runtime: Runtime) -> None:
        """Begin to hear; ready at once, as leader or standing by."""
        self._runtime, self._bus = runtime, runtime.bus
        self._leadership = Leadership(runtime.bus.lease_seconds)
        self._metrics = CoordinatorMetrics(runtime.registry)
        self._metrics.watch(self._leads, lambda: len(self._migrations.under_way()))
        for subscription in (
            await self._bus.subscribe(LoadReport, self._hear_load),
            await self._bus.subscribe(PlacementUpdate, self._hear_placement),
            await self._bus.subscribe(MigrationUpdate, self._hear_migration),
        ):
            self._heard.append(subscription)
        watching = watch_roster(self._bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)
        runtime.spawn("lease", self._keep_lease())
        runtime.spawn("rounds", self._keep_deciding())

    async def drain(self) -> None:
        """Another coordinator leads from now on; migrations under way go on at their owners."""
        self._is_draining = True
        await self._step_down()

    async def close(self) -> None:
        """End the subscriptions."""
        self._is_draining = True
        await self._step_down()
        for subscription in self._heard:
            await subscription.close()

    # What is heard.

    def _hear_load(self, report: LoadReport) -> None:
        self._cluster.hear_load(report, self._clock())

    def _hear_placement(self, told: PlacementUpdate) -> None:
        self._cluster.hear_placement(told, self._clock())

    def _hear_migration(self, told: MigrationUpdate) -> None:
        self._cluster.hear_migration(told.record, self._clock())
        if told.record.phase is MigrationPhase.FAILED:
            self._back_off(told.record)

    def _back_off(self, record: MigrationRecord) -> None:
        if is_automatic(record.move_id) and not record.is_return:
            self._state = back_off(self._state, record.instance, record.host, self._clock())

    def _roster_changed(self, change: RosterChange) -> None:
        for record in self._cluster.roster_changed(change, self._clock()):
            log.warning("move_lost", move_id=record.move_id, error=record.error)

    # Leading.

    def _leads(self) -> bool:
        now = asyncio.get_running_loop().time()
        connection = self._bus.counts.num_reconnects_total
        return not self._is_draining and self._bus.is_connected and self._leadership.is_ours(now, connection)

    async def _keep_lease(self) -> NoReturn:
        while True:
            if not self._is_draining:
                await self._hold_lease()
                await self._follow_leadership()
            await asyncio.sleep(self._bus.lease_seconds / RENEWALS_PER_LEASE)

    async def _hold_lease(self) -> None:
        asked_at = asyncio.get_running_loop().time()
        connection = self._bus.counts.num_reconnects_total
        try:
            is_held = await self._bus.hold_lease(LEASE, self._runtime.incarnation)
        except BusError as error:
            log.debug("lease_not_held", error=str(error))
            return
        self._leadership.answered(is_held=is_held, asked_at=asked_at, connection=connection)

    async def _follow_leadership(self) -> None:
        """Answer while this coordinator leads, and only then."""
        if self._leads() and self._answering is None:
            self._state = LoopState()
            self._answering = await self._bus.serve(ExplainRounds, self._explain, queue_group=QUEUE_GROUP)
            self._runtime.describe(detail="leads")
            log.info("leadership_taken", num_moves_adopted=len(self._migrations.under_way()))
        elif self._answering is not None and not self._leads():
            await self._stop_answering()
            self._runtime.describe(detail="stands by")
            log.warning("leadership_lost")

    async def _stop_answering(self) -> None:
        answering, self._answering = self._answering, None
        if answering is not None:
            await answering.close()
        self._metrics.stepped_down()

    async def _step_down(self) -> None:
        led = self._answering is not None
        await self._stop_answering()
        self._leadership.end()
        if led:
            try:
                await self._bus.release_lease(LEASE, self._runtime.incarnation)
            except BusError as error:
                log.info("lease_not_released", error=str(error))

    async def _explain(self, asked: ExplainRounds) -> Rounds:
        return Rounds(
            leader=self._runtime.identity.name,
            is_automatic=self._settings.automatic,
            rounds=self._rounds.newest_first(asked.num_rounds),
        )

    # The loop.

    async def _keep_deciding(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._settings.round_seconds)
            if self._leads() and self._answering is not None:
                self._abandon_overdue()
                self._decide()

    def _decide(self) -> None:
        now = self._clock()
        view = view_of(self._cluster, now)
        decision, self._state, report = decide(view, self._state, self._balancing, now)
        self._metrics.saw(report)
        self._rounds.add(report)
        if decision is None:
            self._metrics.decisions.labels("stayed").inc()
            return
        log.info("move_decided", decision=report.decision, gap=round(report.gap, 3))
        if isinstance(decision, Flip):
            self._runtime.spawn("change-role", self._change_role(decision.worker, decision.to))
        else:
            self._begin(decision, report, now)

    def _begin(self, decision: Outbound | Inbound, report: RoundReport, now: float) -> None:
        move_id = new_move_id(now, secrets.token_hex(2), is_automatic=True)
        epoch = self._state.devices[decision.instance].placement.epoch
        order = StartMigration(
            move_id=move_id,
            module=decision.module if isinstance(decision, Outbound) else None,
            returned_move_id=decision.move_id if isinstance(decision, Inbound) else "",
            host=decision.host if isinstance(decision, Outbound) else "",
            with_weights=isinstance(decision, Outbound) and decision.with_weights,
            num_blocks=decision.num_blocks if isinstance(decision, Outbound) else 0,
            expected_epoch=epoch,
            deadline_seconds=self._settings.move_deadline_seconds,
            reason=report.decision,
        )
        owner = self._roster.get(decision.instance)
        if owner is None:  # views are of the roster, and nothing was awaited since
            raise LookupError(f"the worker {decision.instance} is in the view and not in the roster")
        host_name = self._cluster.name(decision.host)
        record = planned(order, owner, decision.module, decision.host, host_name, now)
        self._rounds.replace_last(msgspec.structs.replace(report, move_id=move_id))
        self._migrations.hear(record, now)
        self._runtime.spawn("order", self._order(order, record))

    async def _order(self, order: StartMigration, record: MigrationRecord) -> None:
        """Ask the owner. Where its answer does not come the migration stays in the history: it may have
        begun, and the owner tells whether it has."""
        try:
            answer = await self._bus.request(order, to=record.instance, timeout_seconds=ORDER_TIMEOUT_SECONDS)
        except (RequestTimedOut, NotConnected, Undecodable) as error:
            log.warning("order_unanswered", move_id=order.move_id, error=str(error))
        except BusError as error:
            self._was_denied("unanswered", f"{record.instance_name}: {error}")
            self._migrations.withdraw(order.move_id)
            self._back_off(record)
            return
        else:
            if isinstance(answer, MigrationDenied):
                self._was_denied(answer.reason.value, answer.detail)
                self._migrations.withdraw(order.move_id)
                self._back_off(record)
                return
        self._metrics.decisions.labels("brought_home" if record.is_return else "moved").inc()

    async def _change_role(self, worker: str, role: Role) -> None:
        order = ChangeRole(role=role)
        try:
            answer = await self._bus.request(order, to=worker, timeout_seconds=ORDER_TIMEOUT_SECONDS)
        except BusError as error:
            self._was_denied("unanswered", f"{self._cluster.name(worker)}: {error}")
            return
        if isinstance(answer, MigrationDenied):
            self._was_denied(answer.reason.value, answer.detail)
        else:
            self._metrics.decisions.labels("flipped").inc()

    def _was_denied(self, reason: str, detail: str) -> None:
        self._metrics.decisions.labels("denied").inc()
        log.warning("move_denied", reason=reason, detail=detail)

    def _abandon_overdue(self) -> None:
        under_way = self._migrations.under_way()
        self._abandoned &= {one.move_id for one in under_way}
        latest = self._clock() - self._settings.move_deadline_seconds - GRACE_SECONDS
        for record in under_way:
            if record.move_id not in self._abandoned and self._migrations.heard_at(record.move_id) < latest:
                self._abandoned.add(record.move_id)
                log.warning("move_overdue", move_id=record.move_id, phase=record.phase.value)
                self._runtime.spawn("abandon", self._abandon(record))

    async def _abandon(self, record: MigrationRecord) -> None:
        order = CancelMigration(move_id=record.move_id)
        try:
            answer = await self._bus.request(order, to=record.instance, timeout_seconds=ORDER_TIMEOUT_SECONDS)
        except BusError as error:
            log.warning("abandon_unanswered", move_id=record.move_id, error=str(error))
            self._migrations.fail(record.move_id, f"abandoned: {error}", self._clock())
            return
        if isinstance(answer, MigrationDenied) and answer.reason is not DenialReason.INVALID:
            self._migrations.fail(record.move_id, f"abandoned: {answer.detail}", self._clock())
