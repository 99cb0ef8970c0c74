"""When a prompt's first token would come from each candidate, for a local hit, a store hit or recomputing.

The formulas of `libs.cost` for all candidates at once, and one thing more: a fetch starts when the prompt is
queued, so it is hidden by the work in front of the prompt as well as by the prompt's own layers.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from libs.routing.candidates import Floats, Ints, PrefillCandidates, Prompt

_SHARES = np.linspace(0.0, 1.0, 9)[:, None]
"""How much of what could be fetched: workers look closer, this is to compare them."""


class HitKind(Enum):
    """Where the beginning of a prompt's KV comes from."""

    LOCAL = "local"
    """From the instance's own pool."""
    STORE = "store"
    """A part at least comes from a store."""
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Per candidate; fetching as much as makes the first token come soonest."""

    ttft_seconds: Floats
    """From now to the first token."""
    own_seconds: Floats
    """How long the prompt keeps the instance busy."""
    num_local_blocks: Ints
    num_fetched_blocks: Ints

    def kind(self, index: int) -> HitKind:
        """What this candidate would do."""
        if self.num_fetched_blocks[index]:
            return HitKind.STORE
        return HitKind.LOCAL if self.num_local_blocks[index] else HitKind.RECOMPUTE


def predict(prompt: Prompt, candidates: PrefillCandidates) -> Prediction:
    """Source: BanaServe's overlap, `f + (L-1)*max(f, c) + c = max(f + L*c, L*f + c)`, behind a queue."""
    reusable = min(prompt.num_reusable_blocks, len(prompt.store_end) - 1)
    local = np.minimum(candidates.num_local_blocks, prompt.num_reusable_blocks)
    known = np.minimum(local, reusable)
    held = np.maximum(np.minimum(prompt.store_end[known], reusable) - local, 0)
    if not held.any():
        fetched = np.zeros((1, len(candidates)), dtype=np.int64)
    else:
        fetched = np.rint(held * _SHARES).astype(np.int64)
    first, rest = _computing_seconds(prompt, candidates, (local + fetched) * prompt.block_size)
    queue = candidates.queued_seconds
    ttft = queue + first + rest
    if held.any():
        fetching = _streaming_seconds(prompt, candidates, known, fetched)
        per_layer = fetching / prompt.num_layers
        latency = candidates.fetch_latency_seconds
        in_time = np.maximum(queue, latency + per_layer) + first
        awaited = latency + fetching + first / prompt.num_layers
        ttft = np.where(fetched > 0, np.maximum(in_time, awaited) + rest, ttft)
    best = np.argmin(ttft, axis=0)
    columns = np.arange(len(candidates))
    return Prediction(
        ttft_seconds=ttft[best, columns],
        own_seconds=(first + rest)[best, columns],
        num_local_blocks=local,
        num_fetched_blocks=fetched[best, columns],
    )


def _computing_seconds(prompt: Prompt, candidates: PrefillCandidates, context: Ints) -> tuple[Floats, Floats]:
    """Seconds of the first step, and of all later ones, with the KV of `context` tokens there."""
    num_new = prompt.num_tokens - context
    num_first = np.minimum(num_new, prompt.max_step_tokens)
    num_rest = num_new - num_first
    step, token, pair = candidates.step_seconds, candidates.token_seconds, candidates.pair_seconds
    first = step + token * num_first + pair * num_first * (context + 0.5 * num_first)
    num_steps = -(-num_rest // prompt.max_step_tokens)
    rest = step * num_steps + token * num_rest + pair * num_rest * (context + num_first + 0.5 * num_rest)
    return first, rest


def _streaming_seconds(prompt: Prompt, candidates: PrefillCandidates, known: Ints, fetched: Ints) -> Floats:
    """The slower of Link and disk, which work at the same time."""
    seconds: Floats = fetched * prompt.block_bytes / candidates.fetch_bytes_per_second
    rate = candidates.disk_bytes_per_second
    if not rate.any():
        return seconds
    ends = np.minimum(known + fetched, len(prompt.disk_before) - 1)
    num_disk_bytes = (prompt.disk_before[ends] - prompt.disk_before[known]) * prompt.block_bytes
    disk_seconds = np.where(rate > 0, num_disk_bytes / np.where(rate > 0, rate, 1.0), 0.0)
    return np.maximum(seconds, disk_seconds)
