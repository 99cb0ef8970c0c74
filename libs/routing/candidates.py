"""The state that policies read: one prompt, and those who could run it, as arrays of one entry each.

Arrays, because a choice among a thousand workers takes well under a millisecond.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libs.cost.prefill import MAX_STEP_TOKENS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def _no_blocks() -> Ints:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Draw:
    """The chance in a choice, drawn by the caller: policies have none of their own."""

    turn: int
    """Choices made so far."""
    first: float
    """In [0, 1), as is the next."""
    second: float


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and which of its blocks stores have. Positions are counted in full blocks."""

    num_tokens: int
    block_size: int = 16
    block_bytes: int = 0
    """One block in all layers."""
    num_layers: int = 1
    store_end: Ints = field(default_factory=_no_blocks)
    """For each position 0..k: stores have the blocks from there up to this one, without a gap. Nobody has
    blocks from k on."""
    disk_before: Ints = field(default_factory=_no_blocks)
    """For each position 0..k: how many blocks before it stores have on disk alone."""
    max_step_tokens: int = MAX_STEP_TOKENS

    @property
    def num_reusable_blocks(self) -> int:
        """The last token is always computed, for its logits."""
        return max(0, self.num_tokens - 1) // self.block_size


@dataclass(frozen=True, slots=True)
class PrefillCandidates:
    """Instances that may run the prompt: at least one."""

    queued_seconds: Floats
    """Work queued and running, what was sent there and is not reported yet included."""
    num_prompts: Ints
    """How many prompts that is."""
    num_local_blocks: Ints
    """The first so many blocks of the prompt are in the instance's own pool."""
    step_seconds: Floats
    token_seconds: Floats
    pair_seconds: Floats
    """See `libs.cost.prefill.PrefillCost`."""
    fetch_latency_seconds: Floats
    fetch_bytes_per_second: Floats
    disk_bytes_per_second: Floats
    """See `libs.cost.fetch.FetchCost`; 0: not known."""

    def __len__(self) -> int:
        return len(self.queued_seconds)

    def only(self, index: int) -> "PrefillCandidates":
        """One of them alone."""
        one = slice(index, index + 1)
        return PrefillCandidates(*(getattr(self, name)[one] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class DecodeCandidates:
    """Instances with room to decode the sequence: at least one."""

    num_blocks: Ints
    """Of the whole pool."""
    num_free_blocks: Ints
    """Neither held, nor expected to be taken by the sequences that are there or on their way."""
    num_sequences: Ints

    def __len__(self) -> int:
        return len(self.num_blocks)
