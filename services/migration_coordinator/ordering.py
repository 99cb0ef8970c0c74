"""From a wish, by hand or of the loop, to the order for a home worker; or why not. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from libs.balancing.view import Inbound, Outbound
from libs.bus.messages.migration import DenialReason, MoveDenied, MoveRecord, PlanMove, StartMove
from libs.bus.messages.presence import Presence
from libs.placement.module import Module, ModuleKind
from libs.placement.phases import MovePhase
from libs.placement.placement import BadPlacement, Placed, Placement, check_module
from libs.worker.migration.owner.orders import (
    busy_words,
    hosts_nothing_words,
    nothing_away_words,
    other_model_words,
    why_not_ready,
)
from services.migration_coordinator.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Order:
    """A move to ask its home for, and how it stands in the history until the home tells of it."""

    home: str
    start: StartMove
    record: MoveRecord


class Denied(Exception):
    """A move that cannot begin."""

    def __init__(self, reason: DenialReason, detail: str, epoch: int = -1) -> None:
        super().__init__(detail)
        self.answer = MoveDenied(reason=reason, detail=detail, epoch=epoch)


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every order."""

    max_moves: int
    deadline_seconds: float


def order_by_hand(
    plan: PlanMove, move_id: str, cluster: Cluster, under_way: Sequence[MoveRecord], rules: Rules, now: float
) -> Order:
    """Raises Denied. The epoch is compared here already; the home compares it again."""
    home = _home_of(plan, cluster, under_way)
    placement = cluster.placement(home.incarnation)
    _check_ready(home, placement)
    if placement is None:
        detail = f"{home.name} has not told its placement to this coordinator yet; order it again in a second"
        raise Denied(DenialReason.NOT_READY, detail)
    if plan.expected_epoch not in (None, placement.epoch):
        raise Denied(
            DenialReason.STALE_EPOCH,
            f"the placement of {home.name} has epoch {placement.epoch}, not {plan.expected_epoch}; look at "
            "it again and order what still makes sense",
            placement.epoch,
        )
    _check_budget(home, under_way, rules, placement.epoch)
    if plan.returned_move_id:
        placed = _placed(placement, plan, home, cluster)
        return _order(move_id, home.incarnation, placement, placed.worker, cluster, rules, now, placed=placed)
    host = _host_for(plan, home, placement, cluster)
    return _order(
        move_id,
        home.incarnation,
        placement,
        host.incarnation,
        cluster,
        rules,
        now,
        module=plan.module,
        with_weights=plan.with_weights,
        num_blocks=plan.num_blocks,
    )


def order_of_loop(
    decision: Outbound | Inbound, move_id: str, reason: str, cluster: Cluster, rules: Rules, now: float
) -> Order:
    """Raises Denied where its worker has gone meanwhile."""
    placement = cluster.placement(decision.instance)
    if placement is None:
        raise Denied(DenialReason.INSTANCE_NOT_FOUND, f"the worker {decision.instance} is gone")
    home, host = decision.instance, decision.host
    if isinstance(decision, Inbound):
        placed = placement.get(decision.move_id)
        if placed is None:
            raise Denied(DenialReason.NOT_FOUND, f"nothing of move {decision.move_id} is away")
        return _order(move_id, home, placement, host, cluster, rules, now, placed=placed, reason=reason)
    return _order(
        move_id,
        home,
        placement,
        host,
        cluster,
        rules,
        now,
        module=decision.module,
        with_weights=decision.with_weights,
        num_blocks=decision.num_blocks,
        reason=reason,
    )


def _home_of(plan: PlanMove, cluster: Cluster, under_way: Sequence[MoveRecord]) -> Presence:
    """The one that is named, else the one whose module it is, or is about to leave."""
    if plan.instance:
        return _found(plan.instance, cluster, DenialReason.INSTANCE_NOT_FOUND)
    move_id = plan.returned_move_id
    if not move_id:
        raise Denied(DenialReason.INVALID, "name the instance whose module goes away")
    told = [home.incarnation for home, placed in cluster.away() if placed.move_id == move_id]
    told += [one.instance for one in under_way if one.move_id == move_id]
    homes = [home for one in dict.fromkeys(told) if (home := cluster.get(one)) is not None]
    if len(homes) == 1:
        return homes[0]
    if homes:
        names = ", ".join(home.name for home in homes)
        detail = f"move {move_id!r} brought away modules of {names}; name the instance, too"
        raise Denied(DenialReason.INVALID, detail)
    away = ", ".join(f"{placed.move_id} (of {home.name})" for home, placed in cluster.away())
    detail = f"no module that move {move_id!r} brought away is away; " + (
        f"what is away was brought there by {away}" if away else "every module is at home"
    )
    raise Denied(DenialReason.NOT_FOUND, detail)


def _found(who: str, cluster: Cluster, missing: DenialReason) -> Presence:
    if (worker := cluster.find(who)) is None:
        raise Denied(missing, f"there is no worker {who!r}; kvmesh status lists those there are")
    return worker


def _check_ready(worker: Presence, placement: Placement | None) -> None:
    if (why := why_not_ready(worker)) is not None:
        raise Denied(*why, -1 if placement is None else placement.epoch)


def _check_budget(home: Presence, under_way: Sequence[MoveRecord], rules: Rules, epoch: int) -> None:
    for one in under_way:
        if one.instance == home.incarnation:
            raise Denied(DenialReason.BUSY, busy_words(one.move_id), epoch)
    if len(under_way) >= rules.max_moves:
        ids = ", ".join(one.move_id for one in under_way)
        detail = f"{len(under_way)} moves are under way ({ids}), as many as --max-moves allows; wait for one"
        raise Denied(DenialReason.BUSY, detail, epoch)


def _placed(placement: Placement, plan: PlanMove, home: Presence, cluster: Cluster) -> Placed:
    if plan.module is not None or plan.host:
        raise Denied(DenialReason.INVALID, "a module goes away or comes home, not both", placement.epoch)
    placed = placement.get(plan.returned_move_id)
    if placed is None:
        detail = nothing_away_words(placement, plan.returned_move_id)
        if others := [one.name for one, away in cluster.away() if away.move_id == plan.returned_move_id]:
            whose = f"{others[0]}'s; name that instance, or none"
            detail = f"what move {plan.returned_move_id!r} brought away is {whose}"
        raise Denied(DenialReason.NOT_FOUND, f"{home.name}: {detail}", placement.epoch)
    return placed


def _host_for(plan: PlanMove, home: Presence, placement: Placement, cluster: Cluster) -> Presence:
    def refuse(detail: str, reason: DenialReason = DenialReason.INVALID) -> Denied:
        return Denied(reason, detail, placement.epoch)

    if plan.module is None:
        raise refuse("name the module that goes away, or the move whose module is to come home")
    host = _found(plan.host, cluster, DenialReason.WORKER_NOT_FOUND)
    if host.incarnation == home.incarnation:
        raise refuse(f"{home.name} is the module's home already; choose another worker as host")
    _check_ready(host, placement)
    if not host.hosting_address:
        raise refuse(hosts_nothing_words(host.name))
    if host.model_fingerprint != home.model_fingerprint:
        raise refuse(other_model_words(host.name))
    if plan.with_weights and plan.module.kind is not ModuleKind.LAYERS:
        raise refuse(f"weights travel with layers only, not with {plan.module.kind.value}")
    try:
        check_module(placement, plan.module)
    except BadPlacement as error:
        raise refuse(str(error)) from error
    return host


def _order(
    move_id: str,
    home: str,
    placement: Placement,
    host: str,
    cluster: Cluster,
    rules: Rules,
    now: float,
    *,
    module: Module | None = None,
    placed: Placed | None = None,
    with_weights: bool = False,
    num_blocks: int = 0,
    reason: str = "manual",
) -> Order:
    moved = placed.module if placed else module
    if moved is None:
        raise Denied(DenialReason.INVALID, "no module is named", placement.epoch)
    returned_move_id = placed.move_id if placed else ""
    start = StartMove(
        move_id=move_id,
        module=module,
        returned_move_id=returned_move_id,
        host="" if placed else host,
        with_weights=with_weights,
        num_blocks=num_blocks,
        expected_epoch=placement.epoch,
        deadline_seconds=rules.deadline_seconds,
        reason=reason,
    )
    record = MoveRecord(
        move_id=move_id,
        instance=home,
        instance_name=cluster.name(home),
        host=host,
        host_name=cluster.name(host),
        module=moved,
        is_return=placed is not None,
        returned_move_id=returned_move_id,
        with_weights=with_weights,
        phase=MovePhase.PLANNED,
        expected_epoch=placement.epoch,
        epoch=placement.epoch,
        reason=reason,
        started_unix_seconds=now,
    )
    return Order(home, start, record)
