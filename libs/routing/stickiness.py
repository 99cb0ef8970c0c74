"""Which worker a conversation belongs to: the same for every router, without memory.

Rendezvous hashing: when a worker comes or goes, only the conversations it gains or loses move.
"""

from collections.abc import Sequence

from libs.kv.rendezvous import owner_of


def home_of(session: str, workers: Sequence[str]) -> int:
    """The index of the worker (by name, so that a restarted one keeps its conversations). Raises ValueError
    without workers."""
    return workers.index(owner_of(session.encode(), workers))
