"""How a request can end. Each ends in exactly one of these (law 1)."""

from enum import Enum


class FinishReason(Enum):
    """The sequence came to its own end; values as in the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class RefusalReason(Enum):
    """The request was not begun; nothing was computed and nothing is held."""

    OVERLOADED = "overloaded"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    """Fits no pool of this mesh even when it is empty."""
    DEADLINE = "deadline"


class FailureReason(Enum):
    """The request was begun and could not be ended; `RETRYABLE` tells which may be replayed elsewhere."""

    PEER_LOST = "peer_lost"
    LEASE_EXPIRED = "lease_expired"
    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    ABORTED = "aborted"
    INTERNAL = "internal"


RETRYABLE = frozenset({FailureReason.PEER_LOST, FailureReason.LEASE_EXPIRED, FailureReason.CORRUPT})
