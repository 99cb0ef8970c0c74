"""From logits to a random token: temperature, the filters min_p, top_k and top_p, and the inverse of the CDF.

Works on weights, `exp((logit - largest) / temperature)`: 1 for the most likely token, so min_p is a bound on
them as it stands, and every filter becomes one threshold per row. Tokens of equal weight are kept or dropped
together, so that no result depends on how a sort breaks ties.
"""

import numpy as np
import torch
from numpy.typing import NDArray

_WIDTHS = (64, 1024)  # how many candidates to sort before sorting them all; the first is nearly always enough
_SPAN = 128  # vocabulary entries summed at once before the exact place inside one span is looked for
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), 53 bits each, for arrays of seeds and absolute token positions of one shape.

    A function of these alone: so a token does not depend on which worker draws it, in which batch, or how
    often the sequence was replayed.
    """
    mixed = _mix(_mix(seeds) + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014): a bijection that changes half of all bits."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """float32 `[R, V]` weights of logits `[R, V]` at temperatures `[R]`, all above 0."""
    largest = logits.amax(-1, keepdim=True)
    return ((logits - largest) / temperature[:, None]).exp_()


def keep(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The weights with all others set to 0, in place.

    min_p keeps tokens of at least that weight; top_k the k heaviest of these; top_p the heaviest of what is
    left whose predecessors hold less than that share of it. `top_k [R]` is int64 with 0 for all tokens,
    `top_p [R]` float64, `min_p [R]` float32.
    """
    bounds = torch.zeros(len(weights), dtype=weights.dtype, device=weights.device)
    above = weights.masked_fill(weights < min_p[:, None], 0.0)
    mass = above.sum(-1, dtype=torch.float64)
    pending = torch.nonzero((top_k > 0) | (top_p < 1))[:, 0]
    for width in (*_WIDTHS, weights.shape[1]):
        if not len(pending):
            break
        num_candidates = min(width, weights.shape[1])
        heaviest = above[pending].topk(num_candidates).values
        bound, is_sure = _bounds(heaviest, mass[pending], top_k[pending], top_p[pending])
        is_sure |= num_candidates == weights.shape[1]
        bounds[pending[is_sure]] = bound[is_sure]
        pending = pending[~is_sure]
    return weights.masked_fill_(weights < torch.maximum(bounds, min_p)[:, None], 0.0)


def _bounds(
    heaviest: torch.Tensor, mass: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least weight kept per row, judged by its heaviest ones in order, and whether these suffice."""
    num_candidates = heaviest.shape[1]
    last = torch.where(top_k > 0, top_k, num_candidates).clamp(max=num_candidates) - 1
    alive = (heaviest >= heaviest.gather(1, last[:, None])) & (heaviest > 0)
    shares = torch.where(alive, heaviest, 0.0).to(torch.float64)
    total = torch.where(top_k > 0, shares.sum(-1), mass)
    before = shares.cumsum(-1) - shares
    is_complete = (top_k == 0) | ~alive[:, -1]  # else equal weights may go on beyond these candidates
    alive &= (before < (top_p * total)[:, None]) | (top_p >= 1)[:, None]
    num_alive = alive.sum(-1).clamp(min=1)
    return heaviest.gather(1, num_alive[:, None] - 1)[:, 0], is_complete & (num_alive < num_candidates)


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64 `[R]`: the first token, in vocabulary order, at which the cumulated share exceeds `uniform`.

    Two levels, spans and then tokens of one span: less work than one long cumulative sum, and more exact.
    A token of weight 0 is never drawn: the target stays strictly below the sum that is searched.
    """
    num_rows, num_tokens = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -num_tokens % _SPAN)).view(num_rows, -1, _SPAN)
    span_sums = padded.sum(-1).to(torch.float64)
    ends = span_sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    span = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    span_sum = span_sums.gather(1, span)
    share = ((target - (ends.gather(1, span) - span_sum)) / span_sum).clamp_(0.0, 1 - 2.0**-53)
    within = padded.gather(1, span[:, :, None].expand(-1, 1, _SPAN))[:, 0].to(torch.float64).cumsum(-1)
    offset = torch.searchsorted(within, share * within[:, -1:], right=True).clamp_(max=_SPAN - 1)
    return (span * _SPAN + offset)[:, 0]
