"""Whether an order to move a module can be followed, and what it means. Pure."""

from dataclasses import dataclass

from libs.bus.messages.migration import DenialReason, MigrationDenied, StartMigration
from libs.bus.messages.presence import Presence, ServiceState
from libs.placement.placement import BadPlacement, PlacedModule, Placement, check_module


class MigrationRejected(Exception):
    """Why no move begins; `answer` is for who asked."""

    def __init__(self, reason: DenialReason, detail: str, epoch: int) -> None:
        super().__init__(detail)
        self.answer = MigrationDenied(reason=reason, detail=detail, epoch=epoch)


@dataclass(frozen=True)
class OrderContext:
    """What an order is held against."""

    placement: Placement
    fingerprint: str
    """Of the owner's model and block layout."""
    busy_with: str = ""
    """The move under way, if one is."""
    is_draining: bool = False


def placed_by(order: StartMigration, context: OrderContext, host: Presence | None) -> PlacedModule:
    """The module as it will be away, or as it is before it comes back. `host` is the one that is named.

    Raises MigrationRejected.
    """
    placement = context.placement

    def refused(reason: DenialReason, detail: str) -> MigrationRejected:
        return MigrationRejected(reason, detail, placement.epoch)

    if context.is_draining:
        raise refused(DenialReason.DRAINING, "this instance is about to end; nothing of it moves any more")
    if order.expected_epoch != placement.epoch:
        detail = (
            f"the placement is at epoch {placement.epoch}, not {order.expected_epoch}; look at it again and "
            "order what still makes sense"
        )
        raise refused(DenialReason.STALE_EPOCH, detail)
    if context.busy_with:
        raise refused(DenialReason.BUSY, busy_words(context.busy_with))
    if order.module is None:
        if (placed := placement.get(order.returned_move_id)) is None:
            detail = nothing_away_words(placement, order.returned_move_id)
            raise refused(DenialReason.NOT_FOUND, detail)
        return placed
    try:
        check_module(placement, order.module)
    except BadPlacement as error:
        raise refused(DenialReason.INVALID, str(error)) from error
    if (why := _why_no_host(order.host, context, host)) is not None:
        raise refused(*why)
    return PlacedModule(
        move_id=order.move_id,
        module=order.module,
        worker=order.host,
        has_weights_at_owner=not order.with_weights,
        num_blocks=order.num_blocks,
    )


def _why_no_host(
    worker: str, context: OrderContext, host: Presence | None
) -> tuple[DenialReason, str] | None:
    if worker == context.placement.owner:
        return DenialReason.INVALID, "a module cannot move to the worker that is its home"
    if host is None:
        return (
            DenialReason.WORKER_NOT_FOUND,
            f"the home knows no worker {worker!r}; it may have left just now",
        )
    if (why := why_not_ready(host)) is not None:
        return why
    if not host.hosting_address:
        return DenialReason.INVALID, hosts_nothing_words(host.name)
    if host.model_fingerprint != context.fingerprint:
        return DenialReason.INVALID, other_model_words(host.name)
    return None


def why_not_ready(worker: Presence) -> tuple[DenialReason, str] | None:
    """Why a worker that is there takes no part in a move, if it takes none."""
    busy_with = f" ({worker.detail})" if worker.detail else ""
    match worker.state:
        case ServiceState.READY:
            return None
        case ServiceState.DRAINING:
            detail = f"{worker.name} is about to end{busy_with}: nothing moves to it any more"
            return DenialReason.DRAINING, detail
        case ServiceState.STARTING:
            detail = f"{worker.name} is not ready yet{busy_with}; order it again when it is"
            return DenialReason.NOT_READY, detail


def busy_words(move_id: str) -> str:
    """Of an instance that has a move under way."""
    return f"move {move_id} of this instance is under way, and there is one at a time; wait or cancel it"


def nothing_away_words(placement: Placement, move_id: str) -> str:
    """Of a module that is to come back and is not away."""
    away = ", ".join(placed.move_id for placed in placement.placed)
    return f"no module that move {move_id!r} brought away is away; " + (
        f"what is away was brought there by {away}" if away else "nothing of this instance is"
    )


def hosts_nothing_words(name: str) -> str:
    """Of a worker that was told to host nothing."""
    return f"{name} hosts no modules: choose another host, or start it without --no-hosting"


def other_model_words(name: str) -> str:
    """Of a worker whose model or blocks are not the owner's."""
    return f"{name} has another model, dtype or block size than the home; choose a host that has the same"
