"""Paged attention in plain torch: the meaning of the other kernels, and the way without them."""

import torch

from kernels.paged_attention.contract import AttentionBatch


class ReferenceAttention:
    """One sequence after the other, all arithmetic in float32."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v `[T, H, hd]` in the slots of `kv`."""
        block_size = kv.shape[3]
        blocks, offsets = slots // block_size, slots % block_size
        kv[blocks, :, 0, offsets] = k
        kv[blocks, :, 1, offsets] = v

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        """Attended values `[T, Hq, hd]`."""
        return self.attend_with_lse(q, kv, batch, scale)[0]

    def attend_with_lse(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attended values and the log-sum-exp of each row."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        starts = batch.query_starts.tolist()
        for row, num_context in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[row], starts[row + 1])
            num_blocks = -(-num_context // kv.shape[3])
            blocks = kv[batch.block_tables[row, :num_blocks]]
            keys, values = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :num_context]
            out[rows], lse[rows] = _attend_one(q[rows], keys, values, scale)
        return out, lse


def _attend_one(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: q `[n, Hq, hd]`, keys and values `[H, c, hd]`."""
    (num_queries, num_heads, head_dim), (num_kv_heads, num_context, _) = q.shape, keys.shape
    grouped = q.to(torch.float32).view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.to(torch.float32)[:, None].mT * scale
    positions = torch.arange(num_context - num_queries, num_context, device=q.device)
    hidden = torch.arange(num_context, device=q.device)[None] > positions[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
    attended = weights @ values.to(torch.float32)[:, None]
    rows = attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
    return rows.to(q.dtype), lse.permute(2, 0, 1).reshape(num_queries, num_heads)
