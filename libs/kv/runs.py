"""Runs of blocks, and which store keeps which run. Pure.

A run is `RUN_BLOCKS` consecutive blocks of a chain, counted from its start; the last may be shorter. A run
lies whole on one store, so that a prompt asks few stores and a layer of a run is one piece. Which one is
decided by rendezvous hashing: when a store comes or goes, only the runs that it gains or loses move.
"""

from collections.abc import Sequence

import xxhash

RUN_BLOCKS = 32


def runs_of(num_blocks: int) -> list[range]:
    """Positions of the blocks of each run of a chain, in order. None for no blocks."""
    return [
        range(first, min(first + RUN_BLOCKS, num_blocks))
        for first in range(0, max(0, num_blocks), RUN_BLOCKS)
    ]


def owner_of(key: bytes, names: Sequence[str]) -> str:
    """The name that draws the highest number for this key; the order of `names` does not matter.

    When a name comes or goes, only the keys it gains or loses move. A run belongs to the owner of its first
    block's hash among the stores' names, which a restarted store keeps. Raises ValueError without names.
    """
    if not names:
        raise ValueError("a key needs somebody to belong to; ask only while there is one")
    return max(names, key=lambda name: (xxhash.xxh3_64_intdigest(key + b"\0" + name.encode()), name))


def runs_by_store(names: Sequence[bytes], stores: Sequence[str]) -> dict[str, list[range]]:
    """The runs of a chain with these names by the store that keeps them, in order; empty without stores."""
    by_store: dict[str, list[range]] = {}
    if stores:
        for run in runs_of(len(names)):
            by_store.setdefault(owner_of(names[run.start], stores), []).append(run)
    return by_store


def joined_runs(runs: Sequence[range]) -> list[range]:
    """Runs in order, those that follow each other without a gap as one."""
    joined: list[range] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined
