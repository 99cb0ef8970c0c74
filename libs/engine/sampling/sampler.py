"""Chooses the next token of each row of a step, all rows at once."""

from collections.abc import Sequence as Rowwise
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from libs.engine.sampling.distribution import draw, keep, uniform, weights
from libs.engine.sampling.logit_edits import edit
from libs.engine.scheduling.rows import Needs, Rows
from libs.engine.scheduling.sequence import Sequence
from libs.request.sampling import TokenLogprobs

NOT_FINITE = -1
"""In place of a token id where the model's logits hold NaN: there is no right token then."""


@dataclass(frozen=True)
class Sampled:
    """`token_ids [N]`; `logprobs` by index into these rows, for those that asked."""

    token_ids: NDArray[np.int64]
    logprobs: dict[int, TokenLogprobs]


def sample(
    logits: torch.Tensor, table: Rows, rows: NDArray[np.int64], sequences: Rowwise[Sequence]
) -> Sampled:
    """One token per row of float32 `logits [N, V]`, which are used up.

    `rows` and `sequences` are the N rows of `table` and their sequences. Logprobs are the log-softmax of the
    raw logits: before bias, penalties, temperature and filters. Noise comes from (seed, position).
    """
    needs = table.needs[rows]
    if not needs.any():
        return Sampled(_greedy(logits), {})
    asking = np.flatnonzero(needs & Needs.LOGPROBS)
    raw = torch.log_softmax(logits[torch.from_numpy(asking)], -1) if len(asking) else None
    edited = np.flatnonzero(needs & Needs.EDITS).tolist()
    if edited:
        edit(logits, edited, [sequences[index] for index in edited])
    token_ids = _greedy(logits)
    noisy = np.flatnonzero(needs & Needs.NOISE)
    if len(noisy):
        drawn = _draw(logits, table, rows[noisy], noisy)
        token_ids[noisy] = np.where(token_ids[noisy] == NOT_FINITE, NOT_FINITE, drawn)
    logprobs: dict[int, TokenLogprobs] = {}
    if raw is not None:
        asked = [sequences[index].generation.sampling.logprobs or 0 for index in asking.tolist()]
        told = _logprobs(raw, token_ids[asking], asked)
        logprobs = dict(zip(asking.tolist(), told, strict=True))
    return Sampled(token_ids, logprobs)


def _greedy(logits: torch.Tensor) -> NDArray[np.int64]:
    """Argmax of each row, NOT_FINITE where its largest is not.

    On CPUs numpy's is seven times faster than torch's.
    """
    if logits.device.type == "cpu":
        values = logits.numpy()
        token_ids: NDArray[np.int64] = values.argmax(-1)
        largest = values[np.arange(len(values)), token_ids]
    else:
        best = logits.max(-1)
        token_ids, largest = best.indices.cpu().numpy(), best.values.cpu().numpy()
    if not np.isfinite(largest).all():
        token_ids[~np.isfinite(largest)] = NOT_FINITE
    return token_ids


def _draw(
    logits: torch.Tensor, table: Rows, rows: NDArray[np.int64], noisy: NDArray[np.int64]
) -> NDArray[np.int64]:
    device = logits.device
    top_k, top_p, min_p = table.top_k[rows], table.top_p[rows], table.min_p[rows]
    part = logits if len(noisy) == len(logits) else logits[torch.from_numpy(noisy).to(device)]
    mass = weights(part, torch.from_numpy(table.temperature[rows]).to(device))
    filtered = np.flatnonzero((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(filtered):
        index = torch.from_numpy(filtered).to(device)
        bounds = (torch.from_numpy(column[filtered]).to(device) for column in (top_k, top_p, min_p))
        mass[index] = keep(mass[index], *bounds)
    noise = torch.from_numpy(uniform(table.seed[rows], table.num_tokens[rows])).to(device)
    drawn: NDArray[np.int64] = draw(mass, noise).cpu().numpy()
    return drawn


def _logprobs(raw: torch.Tensor, token_ids: NDArray[np.int64], asked: list[int]) -> list[TokenLogprobs]:
    """`raw` are the rows' log-probabilities, `asked` how many of the most likely tokens each wants."""
    chosen = torch.from_numpy(token_ids.clip(min=0)).to(raw.device)
    values = raw.gather(1, chosen[:, None])[:, 0].tolist()
    best = raw.topk(min(max(asked), raw.shape[1]))
    ids, tops = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprobs(value, tuple(ids[row][:count]), tuple(tops[row][:count]))
        for row, (value, count) in enumerate(zip(values, asked, strict=True))
    ]
