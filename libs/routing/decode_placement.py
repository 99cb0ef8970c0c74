"""Which instance decodes a sequence: by the KV that it is going to take there, or by its session."""

from collections.abc import Sequence

import numpy as np

from libs.kv.runs import owner_of
from libs.routing.candidates import DecodeCandidates, Draw, Floats, Ints

NEAR_SHARE = 0.01
"""Of a pool. Candidates this close count as equal, for the same reasons as in `policies`."""


def blocks_for(num_tokens: int | Ints, block_size: Ints) -> Ints:
    """Blocks that so many tokens and the one that comes next take."""
    blocks: Ints = num_tokens // block_size + 1
    return blocks


def expected_output_tokens(mean_output_tokens: Floats, at_most: int) -> Ints:
    """How long an answer will be: what answers took on average, and `at_most`. A mean of 0 is not known yet:
    then nothing is expected, so that nothing is held back."""
    expected: Ints = np.minimum(mean_output_tokens, at_most).astype(np.int64)
    return expected


def expected_growth_blocks(
    num_running: Ints, num_beginning: Ints, num_output_tokens: Ints, block_size: Ints
) -> Ints:
    """Blocks that the sequences of each instance will yet take: those running are halfway on average, and
    each needs one more at least."""
    whole = num_output_tokens // block_size
    growth: Ints = num_running * np.maximum(whole // 2, 1) + num_beginning * np.maximum(whole, 1)
    return growth


def least_kv(num_needed_blocks: Ints, candidates: DecodeCandidates, draw: Draw) -> int:
    """The one whose pool will be the least full with this sequence in it. `num_needed_blocks`: per
    candidate."""
    taken = candidates.num_blocks - candidates.num_free_blocks + num_needed_blocks
    share = taken / np.maximum(candidates.num_blocks, 1)
    near = np.flatnonzero(share <= share.min() + NEAR_SHARE)
    counts = candidates.num_sequences[near]
    near = near[counts == counts.min()]
    return int(near[int(draw.first * len(near))])


def session_worker(session: str, workers: Sequence[str]) -> int:
    """The index of the worker that a session belongs to, by name, so that a restarted one keeps its sessions:
    the same for every router, without memory. When a worker comes or goes, only the sessions that it gains or
    loses move (rendezvous hashing). Raises ValueError without workers."""
    return workers.index(owner_of(session.encode(), workers))
