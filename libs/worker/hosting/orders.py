"""Whether an order to move a module can be followed, and what it means. Pure."""

from dataclasses import dataclass

from libs.bus.messages.migration import DenialReason, MoveDenied, StartMove
from libs.bus.messages.presence import Presence, ServiceState
from libs.placement.placement import BadPlacement, Placed, Placement, check_module


class Refused(Exception):
    """Why no move begins; `answer` is for who asked."""

    def __init__(self, reason: DenialReason, detail: str, epoch: int) -> None:
        super().__init__(detail)
        self.answer = MoveDenied(reason=reason, detail=detail, epoch=epoch)


@dataclass(frozen=True)
class Standing:
    """What an order is held against."""

    placement: Placement
    fingerprint: str
    """Of the home's model and block layout."""
    busy_with: str = ""
    """The move under way, if one is."""
    is_draining: bool = False


def placed_by(order: StartMove, standing: Standing, host: Presence | None) -> Placed:
    """The module as it will be away, or as it is before it comes home. `host` is the one that is named.

    Raises Refused.
    """
    placement = standing.placement

    def refused(reason: DenialReason, detail: str) -> Refused:
        return Refused(reason, detail, placement.epoch)

    if standing.is_draining:
        raise refused(DenialReason.DRAINING, "this instance is about to end; nothing of it moves any more")
    if order.expected_epoch != placement.epoch:
        detail = f"the placement is at epoch {placement.epoch}, not {order.expected_epoch}; look again"
        raise refused(DenialReason.STALE_EPOCH, detail)
    if standing.busy_with:
        raise refused(DenialReason.BUSY, f"move {standing.busy_with} is under way; one at a time")
    if order.module is None:
        if (placed := placement.get(order.returned_move_id)) is None:
            detail = f"no module that move {order.returned_move_id!r} brought away is away"
            raise refused(DenialReason.NOT_FOUND, detail)
        return placed
    try:
        check_module(placement, order.module)
    except BadPlacement as error:
        raise refused(DenialReason.INVALID, str(error)) from error
    if (why := _why_no_host(order.host, standing, host)) is not None:
        raise refused(*why)
    return Placed(
        move_id=order.move_id,
        module=order.module,
        worker=order.host,
        has_weights_at_home=not order.with_weights,
        num_blocks=order.num_blocks,
    )


def _why_no_host(worker: str, standing: Standing, host: Presence | None) -> tuple[DenialReason, str] | None:
    if worker == standing.placement.home:
        return DenialReason.INVALID, "a module cannot move to the worker that is its home"
    if host is None:
        return DenialReason.NOT_FOUND, f"this worker knows no worker {worker!r}"
    if host.state is not ServiceState.READY:
        return DenialReason.DRAINING, f"{host.name} is {host.state.value}"
    if not host.hosting_address:
        return DenialReason.INVALID, f"{host.name} hosts no modules; start it with --hosting"
    if host.model_fingerprint != standing.fingerprint:
        detail = f"{host.name} serves another model or block size: {host.model_fingerprint}"
        return DenialReason.INVALID, detail
    return None
