"""The error that a client sees for a sequence that did not finish. Pure."""

from libs.bus.messages.generation import Refused
from libs.request.outcome import FailureReason, RefusalReason
from services.gateway.api.errors import ApiError, ContextTooLong, DeadlineOver, Overloaded, Unavailable
from services.gateway.api.errors import Failed as InternalFailure
from services.gateway.generation.sequence import Failed


def error_of(outcome: Refused | Failed) -> ApiError:
    """The error of a sequence that was refused or failed."""
    return _of_refusal(outcome) if isinstance(outcome, Refused) else _of_failure(outcome)


def _of_refusal(refused: Refused) -> ApiError:
    retry_after_seconds = refused.retry_after_seconds
    match refused.reason:
        case RefusalReason.OVERLOADED:
            text = f"all workers are busy: {refused.detail}"
            return Overloaded(text, retry_after_seconds=retry_after_seconds)
        case RefusalReason.NO_WORKERS:
            text = f"no worker can take this request now: {refused.detail}"
            return Unavailable(text, code="no_workers", retry_after_seconds=retry_after_seconds)
        case RefusalReason.DRAINING:
            text = f"shutting down: {refused.detail}"
            return Unavailable(text, code="draining", retry_after_seconds=retry_after_seconds)
        case RefusalReason.TOO_LONG:
            return ContextTooLong(f"the request is too long for this mesh: {refused.detail}")
        case RefusalReason.DEADLINE:
            return DeadlineOver(f"the request's deadline passed: {refused.detail}")


def _of_failure(failed: Failed) -> ApiError:
    match failed.reason:
        case FailureReason.DEADLINE:
            return DeadlineOver(f"the request's deadline passed: {failed.detail}")
        case FailureReason.INTERNAL:
            return InternalFailure(f"the worker failed: {failed.detail}")
        case _:
            text = f"the answer could not be brought to its end: {failed.detail}"
            return Unavailable(text, code=failed.reason.value)
