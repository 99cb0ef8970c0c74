"""The migration coordinator on the bus: hears the workers, leads or stands by, orders moves, answers."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import structlog

from libs.balancing.decide import decide
from libs.balancing.state import LoopState, back_off
from libs.balancing.view import Decision, Flip, Inbound, Outbound, RoundReport
from libs.bus.errors import BusError
from libs.bus.messages.migration import (
    AbandonMove,
    CancelMove,
    DenialReason,
    ExplainRounds,
    FlipRole,
    ListMoves,
    MoveAccepted,
    MoveDenied,
    MoveRecord,
    MoveTold,
    PlacementTold,
    PlanMove,
    Rounds,
)
from libs.bus.messages.migration import (
    Moves as MovesListed,
)
from libs.bus.messages.presence import LoadReport
from libs.bus.subscriptions import Subscription
from libs.placement.phases import MovePhase, is_automatic, is_over, new_move_id
from libs.runtime.roster import Roster, RosterChange, watch_roster
from libs.runtime.runtime import Runtime
from services.migration_coordinator.answers import that_fit
from services.migration_coordinator.cluster import Cluster
from services.migration_coordinator.denials import denial_of, may_have_been_done, over_words
from services.migration_coordinator.leadership import Leadership
from services.migration_coordinator.metrics import CoordinatorMetrics
from services.migration_coordinator.moves import Moves
from services.migration_coordinator.ordering import Denied, Order, Rules, order_by_hand, order_of_loop
from services.migration_coordinator.rounds import RoundLog
from services.migration_coordinator.settings import CoordinatorSettings, balancing_of

LEASE = "migration-coordinator"
QUEUE_GROUP = "coordinators"
RENEWALS_PER_LEASE = 4
ORDER_TIMEOUT_SECONDS = 5.0
STALE_AFTER_SECONDS = 3.0
"""A worker whose load reports stay out for longer is not used."""
MAX_HISTORY = 200
"""Moves that are remembered."""

log = structlog.get_logger()


class CoordinatorService:
    """One coordinator. `clock` gives unix seconds."""

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self._balancing = balancing_of(settings)
        self._rules = Rules(settings.max_moves, settings.move_deadline_seconds)
        self._cluster = Cluster(STALE_AFTER_SECONDS)
        self._moves = Moves(MAX_HISTORY, settings.move_deadline_seconds)
        self._rounds = RoundLog()
        self._state = LoopState()
        self._roster = Roster()
        self._heard: list[Subscription] = []
        self._answering: list[Subscription] = []
        self._is_draining = False

    async def open(self, runtime: Runtime) -> None:
        """Begin to hear; ready at once, as leader or standing by."""
        self._runtime, self._bus = runtime, runtime.bus
        self._leadership = Leadership(runtime.bus.lease_seconds)
        self._metrics = CoordinatorMetrics(runtime.registry)
        self._metrics.watch(self._leads, lambda: len(self._moves.under_way()))
        for subscription in (
            await self._bus.subscribe(LoadReport, self._hear_load),
            await self._bus.subscribe(PlacementTold, self._hear_placement),
            await self._bus.subscribe(MoveTold, self._hear_move),
        ):
            self._heard.append(subscription)
        watching = watch_roster(self._bus, self._roster, self._roster_changed, hears_itself=True)
        runtime.spawn("roster", watching)
        runtime.spawn("lease", self._keep_lease())
        runtime.spawn("rounds", self._keep_deciding())

    async def drain(self) -> None:
        """Another coordinator leads from now on; moves under way go on at their home workers."""
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

    def _hear_placement(self, told: PlacementTold) -> None:
        self._cluster.hear_placement(told)
        self._log_failed(self._moves.placement_told(told, self._clock()))

    def _hear_move(self, told: MoveTold) -> None:
        move = told.move
        self._moves.told(move, self._clock())
        if move.phase is MovePhase.FAILED:
            self._came_to_nothing(move)

    def _came_to_nothing(self, move: MoveRecord) -> None:
        if is_automatic(move.move_id) and not move.is_return:
            self._state = back_off(self._state, move.instance, move.host, self._clock())

    def _roster_changed(self, change: RosterChange) -> None:
        self._cluster.set_members(self._roster.all())
        for presence in change.departed:
            self._log_failed(self._moves.departed(presence.incarnation, self._clock()))

    def _log_failed(self, records: list[MoveRecord]) -> None:
        for record in records:
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
        if self._leads() and not self._answering:
            self._state = LoopState()
            self._answering = [
                await self._bus.serve(PlanMove, self._plan, queue_group=QUEUE_GROUP),
                await self._bus.serve(CancelMove, self._cancel, queue_group=QUEUE_GROUP),
                await self._bus.serve(ListMoves, self._list, queue_group=QUEUE_GROUP),
                await self._bus.serve(ExplainRounds, self._explain, queue_group=QUEUE_GROUP),
            ]
            self._runtime.describe(detail="leads")
            log.info("leadership_taken", num_moves_adopted=len(self._moves.under_way()))
        elif self._answering and not self._leads():
            await self._stop_answering()
            self._runtime.describe(detail="stands by")
            log.warning("leadership_lost")

    async def _stop_answering(self) -> None:
        answering, self._answering = self._answering, []
        for subscription in answering:
            await subscription.close()
        self._metrics.stepped_down()

    async def _step_down(self) -> None:
        led = bool(self._answering)
        await self._stop_answering()
        self._leadership.end()
        if led:
            try:
                await self._bus.release_lease(LEASE, self._runtime.incarnation)
            except BusError as error:
                log.info("lease_not_released", error=str(error))

    # The loop.

    async def _keep_deciding(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._settings.round_seconds)
            if self._leads() and self._answering:
                self._abandon_overdue()
                self._decide()

    def _decide(self) -> None:
        now = self._clock()
        view = self._cluster.view(self._moves.as_under_way(), now)
        decision, self._state, seen = decide(view, self._state, self._balancing, now)
        self._metrics.saw(seen)
        self._rounds.add(seen)
        if decision is None:
            self._metrics.decisions.labels("stayed").inc()
        else:
            log.info("move_decided", decision=seen.decision, gap=round(seen.gap, 3))
            self._act(decision, seen, now)

    def _act(self, decision: Decision, seen: RoundReport, now: float) -> None:
        match decision:
            case Outbound() | Inbound():
                move_id = new_move_id(now, secrets.token_hex(2), is_automatic=True)
                try:
                    order = order_of_loop(decision, move_id, seen.decision, self._cluster, self._rules, now)
                except Denied as denied:
                    self._was_denied(denied.answer)
                    return
                self._rounds.replace_last(msgspec.structs.replace(seen, move_id=move_id))
                verdict = "brought_home" if isinstance(decision, Inbound) else "moved"
                self._moves.ordered(order.record, now)
                self._runtime.spawn("order", self._order_automatic(order, verdict))
            case Flip(worker=worker):
                self._runtime.spawn("flip", self._flip(worker))
            case None:
                pass

    async def _order_automatic(self, order: Order, verdict: str) -> None:
        answer = await self._start(order)
        if isinstance(answer, MoveDenied):
            self._was_denied(answer)
            self._came_to_nothing(order.record)
        else:
            self._metrics.decisions.labels(verdict).inc()

    async def _flip(self, worker: str) -> None:
        try:
            answer = await self._bus.request(FlipRole(), to=worker, timeout_seconds=ORDER_TIMEOUT_SECONDS)
        except BusError as error:
            answer = denial_of(error, self._cluster.name(worker))
        if isinstance(answer, MoveDenied):
            self._was_denied(answer)
        else:
            self._metrics.decisions.labels("flipped").inc()

    def _was_denied(self, denied: MoveDenied) -> None:
        self._metrics.decisions.labels("denied").inc()
        log.warning("move_denied", reason=denied.reason.value, detail=denied.detail)

    async def _start(self, order: Order) -> MoveAccepted | MoveDenied:
        """Ask the home. Where its answer does not come the move stays in the history: it may have begun, and
        the home tells whether it has."""
        move_id = order.record.move_id
        try:
            answer = await self._bus.request(
                order.start, to=order.home, timeout_seconds=ORDER_TIMEOUT_SECONDS
            )
        except BusError as error:
            log.warning("order_unanswered", move_id=move_id, error=str(error))
            if may_have_been_done(error):
                return MoveAccepted(move_id=move_id, epoch=order.record.epoch)
            answer = denial_of(error, order.record.instance_name)
        if isinstance(answer, MoveDenied):
            self._moves.withdraw(move_id)
        return answer

    def _abandon_overdue(self) -> None:
        for record in self._moves.take_overdue(self._clock()):
            log.warning("move_overdue", move_id=record.move_id, phase=record.phase.value)
            self._runtime.spawn("abandon", self._abandon_one(record))

    async def _abandon_one(self, record: MoveRecord) -> None:
        answer = await self._abandon(record)
        if isinstance(answer, MoveDenied) and answer.reason is not DenialReason.INVALID:
            self._moves.fail(record.move_id, f"abandoned: {answer.detail}", self._clock())

    async def _abandon(self, record: MoveRecord) -> MoveAccepted | MoveDenied:
        order = AbandonMove(move_id=record.move_id)
        try:
            return await self._bus.request(order, to=record.instance, timeout_seconds=ORDER_TIMEOUT_SECONDS)
        except BusError as error:
            log.warning("abandon_unanswered", move_id=record.move_id, error=str(error))
            return denial_of(error, record.instance_name or self._cluster.name(record.instance))

    # What others ask.

    async def _plan(self, plan: PlanMove) -> MoveAccepted | MoveDenied:
        if not self._leads():
            return _not_leading()
        now = self._clock()
        move_id = new_move_id(now, secrets.token_hex(2), is_automatic=False)
        try:
            order = order_by_hand(plan, move_id, self._cluster, self._moves.under_way(), self._rules, now)
        except Denied as denied:
            return denied.answer
        self._moves.ordered(order.record, now)
        return await self._start(order)

    async def _cancel(self, cancel: CancelMove) -> MoveAccepted | MoveDenied:
        record = self._moves.get(cancel.move_id)
        if record is None:
            detail = f"no move {cancel.move_id!r} is remembered; kvmesh migrate --list tells those that are"
            return MoveDenied(reason=DenialReason.NOT_FOUND, detail=detail)
        if is_over(record.phase):
            return MoveDenied(reason=DenialReason.INVALID, detail=over_words(record), epoch=record.epoch)
        answer = await self._abandon(record)
        if isinstance(answer, MoveDenied) and answer.reason is DenialReason.NOT_FOUND:
            detail = f"the move {cancel.move_id} has not begun at its home: there is nothing to roll back yet"
            return MoveDenied(reason=DenialReason.INVALID, detail=detail, epoch=record.epoch)
        return answer

    async def _list(self, asked: ListMoves) -> MovesListed:
        moves = self._moves.newest_first()
        if asked.move_id:
            moves = tuple(one for one in moves if one.move_id == asked.move_id)
        return MovesListed(moves=that_fit(moves))

    async def _explain(self, asked: ExplainRounds) -> Rounds:
        return Rounds(
            leader=self._runtime.identity.name,
            is_automatic=self._settings.automatic,
            rounds=self._rounds.newest_first(asked.num_rounds),
        )


def _not_leading() -> MoveDenied:
    return MoveDenied(reason=DenialReason.NOT_LEADING, detail="another coordinator leads now; ask again")
