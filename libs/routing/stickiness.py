"""Which worker a conversation belongs to: the same for every router, without memory.

Rendezvous hashing: when a worker comes or goes, only the conversations it gains or loses move.
"""

from collections.abc import Sequence

import xxhash


def home_of(session: str, workers: Sequence[str]) -> int:
    """The index of the worker (by name, so that a restarted one keeps its conversations). Raises ValueError
    without workers."""
    if not workers:
        raise ValueError("a session needs a worker; ask only while there is one")
    key = session.encode()
    scores = [xxhash.xxh3_64_intdigest(key + b"\0" + worker.encode()) for worker in workers]
    return scores.index(max(scores))
