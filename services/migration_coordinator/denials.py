"""What it means for an order that the worker it went to gave no answer. Pure."""

from libs.bus.messages.migration import DenialReason, MoveDenied
from libs.bus.port import BusError, NoResponders, NotConnected, Overloaded, RequestTimedOut, Undecodable

LOOK = "GET /v1/mesh/migrations (kvmesh migrate --list)"


def may_have_been_done(error: BusError) -> bool:
    """Whether the worker may be doing what it was asked for all the same."""
    return isinstance(error, RequestTimedOut | NotConnected | Undecodable)


def denial_of(error: BusError, worker: str) -> MoveDenied:
    """For who asked; `worker` is its name."""
    match error:
        case NoResponders():
            detail = f"the worker {worker} takes no orders any more: it has just ended, or lost its way"
            return MoveDenied(reason=DenialReason.UNREACHABLE, detail=f"{detail} to the broker; try again")
        case NotConnected():
            detail = f"the worker {worker} cannot be asked, or its answer was lost: {error}; try again"
            return MoveDenied(reason=DenialReason.UNREACHABLE, detail=detail)
        case Overloaded():
            detail = f"the worker {worker} has too many orders waiting; try again"
            return MoveDenied(reason=DenialReason.UNREACHABLE, detail=detail)
        case RequestTimedOut():
            detail = f"the worker {worker} has not answered in time, and may do it still: {LOOK} tells"
            return MoveDenied(reason=DenialReason.NO_ANSWER, detail=detail)
        case Undecodable():
            detail = f"the answer of the worker {worker} is not understood ({error}); {LOOK} tells"
            return MoveDenied(reason=DenialReason.NO_ANSWER, detail=detail)
        case _:
            detail = f"the worker {worker} could not answer ({error}); its log says why"
            return MoveDenied(reason=DenialReason.FAILED, detail=detail)
