"""What it means for an order that the worker it went to gave no answer. Pure."""

from libs.bus.errors import BusError, NoResponders, NotConnected, Overloaded, RequestTimedOut, Undecodable
from libs.bus.messages.migration import DenialReason, MoveDenied, MoveRecord
from libs.placement.phases import MovePhase

LOOK = "GET /v1/mesh/migrations (kvmesh migrate --list)"


def may_have_been_done(error: BusError) -> bool:
    """Whether the worker may be doing what it was asked for all the same."""
    return isinstance(error, RequestTimedOut | NotConnected | Undecodable)


def over_words(record: MoveRecord) -> str:
    """Of a move that cannot be cancelled any more."""
    said = f"the move {record.move_id} is over: {record.phase.value}"
    if record.phase is MovePhase.DONE and not record.is_return:
        said += f"; what it brought away comes home by return_of (kvmesh migrate --return {record.move_id})"
    return said


def denial_of(error: BusError, worker: str) -> MoveDenied:
    """For who asked; `worker` is its name."""
    match error:
        case NoResponders():
            reason = DenialReason.UNREACHABLE
            said = "takes no orders any more: it has just ended, or lost its way to the broker; try again"
        case NotConnected():
            reason = DenialReason.UNREACHABLE
            said = f"cannot be asked, or its answer was lost: {error}; try again"
        case Overloaded():
            reason, said = DenialReason.UNREACHABLE, "has too many orders waiting; try again"
        case RequestTimedOut():
            reason = DenialReason.NO_ANSWER
            said = f"has not answered in time, and may do it still: {LOOK} tells"
        case Undecodable():
            reason = DenialReason.NO_ANSWER
            said = f"gave an answer that is not understood ({error}); {LOOK} tells"
        case _:
            reason, said = DenialReason.FAILED, f"could not answer ({error}); its log says why"
    return MoveDenied(reason=reason, detail=f"the worker {worker} {said}")
