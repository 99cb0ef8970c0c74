"""What clients see of an order that a worker did not follow, or did not answer. Pure."""

from collections.abc import Sequence

from libs.bus.errors import BusError, NoResponders, NotConnected, Overloaded, RequestTimedOut, Undecodable
from libs.bus.messages.migration import DenialReason, MigrationDenied, MigrationRecord
from libs.bus.messages.presence import Presence
from libs.placement.migration import MigrationPhase
from services.gateway.api.errors import (
    ApiError,
    BadRequest,
    Conflict,
    DeadlineOver,
    Failed,
    NotFound,
    Unavailable,
)
from services.gateway.mesh.migration_fields import MigrationRequest, module_param

RETRY_SECONDS = 2

LOOK = "GET /v1/mesh/migrations (kvmesh migrate --list)"


def not_started(denied: MigrationDenied, asked: MigrationRequest, owners: Sequence[Presence]) -> ApiError:
    """The owner's no. `owners` are those of the module that is to come home, as far as this gateway knows."""
    param = module_param(asked)
    match denied.reason:
        case DenialReason.WORKER_NOT_FOUND as reason:
            look = "look at GET /v1/mesh/placement and try again"
            said = f"the worker {asked.host!r} has just left, or has just come; {look}"
            return NotFound(said, param="host", code=reason.value)
        case DenialReason.NOT_FOUND:
            said = denied.detail
            if owners:
                whose = f"{owners[0].name}'s; name that instance, or none"
                said = f"what move {asked.return_of!r} brought away is {whose}"
            return NotFound(said, param=param, code="module_not_found")
        case DenialReason.INVALID:
            return BadRequest(denied.detail, param=param, code="invalid_move")
        case reason:
            return Conflict(denied.detail, code=reason.value, epoch=denied.epoch)


def not_cancelled(denied: MigrationDenied, move_id: str) -> ApiError:
    """The owner's no to rolling a move back that is remembered here."""
    said = denied.detail
    if denied.reason is DenialReason.NOT_FOUND:
        said = f"the move {move_id} has not begun at its home: there is nothing to roll back yet"
    return Conflict(said, code="cannot_cancel", epoch=denied.epoch)


def over_words(record: MigrationRecord) -> str:
    """Of a move that cannot be cancelled any more."""
    said = f"the move {record.move_id} is over: {record.phase.value}"
    if record.phase is MigrationPhase.DONE and not record.is_return:
        said += f"; what it brought away comes home by return_of (kvmesh migrate --return {record.move_id})"
    return said


def may_have_been_done(error: BusError) -> bool:
    """Whether the worker may be doing what it was asked for all the same."""
    return isinstance(error, RequestTimedOut | NotConnected | Undecodable)


def unanswered(error: BusError, worker: str, look: str = LOOK) -> ApiError:
    """A worker, by its name, gave no answer to an order; `look` tells whether it follows it all the same."""
    match error:
        case NoResponders():
            return _unreachable(
                f"the worker {worker} takes no orders any more: it has just ended, or lost its way to the "
                "broker; try again"
            )
        case NotConnected():
            return _unreachable(
                f"the worker {worker} cannot be asked, or its answer was lost: {error}; try again when the "
                f"broker is back, and look at {look} first: it may have begun"
            )
        case Overloaded():
            return _unreachable(f"the worker {worker} has too many orders waiting; try again")
        case RequestTimedOut():
            said = f"the worker {worker} has not answered in time, and may do it still: {look} tells"
            return DeadlineOver(said, code="worker_timeout")
        case Undecodable():
            said = f"the worker {worker} gave an answer that is not understood ({error}); {look} tells"
            return DeadlineOver(said, code="worker_timeout")
        case _:
            return Failed(f"the worker {worker} could not answer ({error}); its log says why")


def broker_away(what: str) -> ApiError:
    """Of what may exist, and was not heard of before the broker was lost."""
    return _unreachable(f"the broker is away, and {what}; try again when it is back")


def _unreachable(said: str) -> ApiError:
    return Unavailable(said, code="worker_unreachable", retry_after_seconds=RETRY_SECONDS)
