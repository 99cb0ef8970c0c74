"""Changes to the logits of single tokens before one is chosen: bias, stop tokens held back, penalties.

Done for all rows of a step together, on the few entries that change, never on whole rows.
"""

from collections.abc import Sequence as Rowwise
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from libs.engine.scheduling.sequence import Sequence


@dataclass
class _Entries:
    """Places `(row, token)` of a step's logits."""

    rows: list[NDArray[np.int64]]
    tokens: list[NDArray[np.int64]]

    def add(self, row: int, tokens: NDArray[np.int64]) -> None:
        self.rows.append(np.full(len(tokens), row))
        self.tokens.append(tokens)

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows, tokens = np.concatenate(self.rows), np.concatenate(self.tokens)
        return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)


def edit(logits: torch.Tensor, rows: Rowwise[int], sequences: Rowwise[Sequence]) -> None:
    """Changes `logits [N, V]` in place at `rows`, one per sequence.

    In this order: `logit_bias` is added; stop tokens become impossible while the output is shorter than
    `min_tokens`; penalties apply. Token ids outside the vocabulary change nothing.
    """
    _add_bias(logits, rows, sequences)
    _hold_back_stops(logits, rows, sequences)
    _penalise(logits, rows, sequences)


def _known(token_ids: Rowwise[int], vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _add_bias(logits: torch.Tensor, rows: Rowwise[int], sequences: Rowwise[Sequence]) -> None:
    entries, values = _Entries([], []), list[NDArray[np.float32]]()
    for row, sequence in zip(rows, sequences, strict=True):
        bias = sequence.generation.sampling.logit_bias
        if bias:
            tokens = _known(list(bias), logits.shape[1])
            entries.add(row, tokens)
            values.append(np.array([bias[token] for token in tokens.tolist()], dtype=np.float32))
    if values:
        added = torch.from_numpy(np.concatenate(values)).to(logits.device)
        logits[entries.places(logits.device)] += added


def _hold_back_stops(logits: torch.Tensor, rows: Rowwise[int], sequences: Rowwise[Sequence]) -> None:
    entries = _Entries([], [])
    for row, sequence in zip(rows, sequences, strict=True):
        if sequence.num_output_tokens < sequence.generation.sampling.min_tokens:
            entries.add(row, _known(list(sequence.stop_ids), logits.shape[1]))
    if entries.rows:
        logits[entries.places(logits.device)] = -torch.inf


def _penalise(logits: torch.Tensor, rows: Rowwise[int], sequences: Rowwise[Sequence]) -> None:
    """Repetition divides positive logits, multiplies negative ones; the others are subtracted."""
    entries, counts, factors = (
        _Entries([], []),
        list[NDArray[np.float32]](),
        list[tuple[float, float, float]](),
    )
    for row, sequence in zip(rows, sequences, strict=True):
        if sequence.seen is not None:
            sampling = sequence.generation.sampling
            entries.add(row, sequence.seen.ids)
            counts.append(sequence.seen.counts)
            factors.append(
                (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
            )
    if not counts:
        return
    places = entries.places(logits.device)
    sizes = [len(part) for part in counts]
    columns = np.repeat(np.array(factors, dtype=np.float32), sizes, axis=0)
    repetition, presence, frequency = torch.from_numpy(columns).to(logits.device).unbind(1)
    count = torch.from_numpy(np.concatenate(counts)).to(logits.device)
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[places] = values - frequency * count - presence * (count > 0)
