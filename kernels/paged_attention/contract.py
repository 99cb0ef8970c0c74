"""What every paged attention takes and gives.

`kv` is one layer of the cache as `[num_blocks, num_kv_heads, 2, block_size, head_dim]`: keys at `[:, :, 0]`,
values at `[:, :, 1]`. Dim 0 may have any stride (a layer, or some heads of a layer, inside a larger pool);
the dims behind it are contiguous. Queries, keys and values may have any stride in dim 0, so that they can be
views into one packed projection.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch of sequences: a prompt chunk has several queries, a decoding sequence has one.

    Query i of a sequence with n queries and c tokens of context stands at position c - n + i and sees the
    positions up to its own. A query that sees nothing gives zeros and a log-sum-exp of -inf.
    """

    block_tables: torch.Tensor
    """int32 `[num_sequences, max_blocks]`: the blocks of each sequence in order; the rest is not read."""
    context_lens: torch.Tensor
    """int32 `[num_sequences]`: tokens in the cache, those of this step included."""
    query_starts: torch.Tensor
    """int32 `[num_sequences + 1]`: row of each sequence's first query, and the number of rows."""
    max_query_len: int
    max_context_len: int


class PagedAttention(Protocol):
    """Causal attention of grouped query heads over the KV heads of `kv`."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v `[T, H, hd]` in the slots (int64 `[T]`, block * block_size + offset) of `kv`."""
        ...

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        """Attended values `[T, Hq, hd]` of queries `[T, Hq, hd]`; Hq is a multiple of the heads in `kv`."""
        ...

    def attend_with_lse(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `attend`, and float32 `[T, Hq]`: the natural log of the sum of exp(score) of each row."""
        ...


def merge_attended(
    outputs: list[torch.Tensor], lses: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole context from its parts' outputs and log-sum-exps."""
    stacked = torch.stack(lses)
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - lse.masked_fill(lse.isneginf(), 0.0))
    merged = (torch.stack([output.to(torch.float32) for output in outputs]) * weights[..., None]).sum(0)
    return merged.to(outputs[0].dtype), lse
