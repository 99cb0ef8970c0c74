"""The batch in arrays: one row per begun sequence, kept from step to step, changed where a sequence changes.

A step indexes these arrays with the rows that it runs, a handful of numpy calls for any number of sequences.
"""

from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from libs.engine.scheduling.sequence import Sequence, has_penalties

MIN_TEMPERATURE = 1e-5
"""Below it the likeliest token has all the probability that float32 can tell, so sampling is greedy."""
_SEED_MASK = (1 << 64) - 1


class Needs(IntFlag):
    """What choosing a row's token takes beyond the largest logit."""

    NOISE = 1
    EDITS = 2
    LOGPROBS = 4


class Rows:
    """Arrays by row. They double when all rows are taken."""

    def __init__(self, max_blocks: int) -> None:
        self._free = list(range(7, -1, -1))
        self.block_tables = np.zeros((8, max_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(8, dtype=np.int64)
        self.last_token = np.zeros(8, dtype=np.int64)
        self.needs = np.zeros(8, dtype=np.uint8)
        self.seed = np.zeros(8, dtype=np.uint64)
        self.temperature = np.zeros(8, dtype=np.float32)
        self.top_p = np.ones(8, dtype=np.float64)
        self.top_k = np.zeros(8, dtype=np.int64)
        self.min_p = np.zeros(8, dtype=np.float32)

    @property
    def num_taken(self) -> int:
        """Rows in use."""
        return len(self.needs) - len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence a row and writes all of it."""
        if not self._free:
            self._double()
        row = sequence.row = self._free.pop()
        sampling = sequence.generation.sampling
        edits = has_penalties(sampling) or bool(sampling.logit_bias) or sampling.min_tokens > 0
        self.needs[row] = (
            (Needs.NOISE if sampling.temperature >= MIN_TEMPERATURE else 0)
            | (Needs.EDITS if edits else 0)
            | (Needs.LOGPROBS if sampling.logprobs is not None else 0)
        )
        self.seed[row] = sampling.seed & _SEED_MASK
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.set_tokens(sequence)
        self.set_blocks(sequence, 0)

    def set_tokens(self, sequence: Sequence) -> None:
        """Copies how many tokens the sequence has, and its last one."""
        self.num_tokens[sequence.row] = sequence.num_tokens
        self.last_token[sequence.row] = sequence.token_ids[-1]

    def set_blocks(self, sequence: Sequence, first: int) -> None:
        """Copies the sequence's blocks from `first` on."""
        self.block_tables[sequence.row, first : sequence.num_blocks] = sequence.blocks[first:]

    def give_back(self, sequence: Sequence) -> None:
        """Frees the row, if the sequence has one."""
        if sequence.row >= 0:
            self._free.append(sequence.row)
            sequence.row = -1

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """The next token of each row."""
        self.last_token[rows] = token_ids
        self.num_tokens[rows] += 1

    def _double(self) -> None:
        size = len(self.needs)
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray):
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._free = list(range(2 * size - 1, size - 1, -1))
