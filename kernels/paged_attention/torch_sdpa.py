"""Paged attention by torch's own attention kernel: the way where neither the native nor Triton's can run."""

import torch

from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention


class TorchAttention(ReferenceAttention):
    """As the reference, but without the log-sum-exp several times faster."""

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        """Attended values `[T, Hq, hd]`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
        for row, num_context in enumerate(contexts):
            rows = slice(starts[row], starts[row + 1])
            num_queries = starts[row + 1] - starts[row]
            if num_context < num_queries:  # rows that see nothing, which torch would answer with NaN
                return self.attend_with_lse(q, kv, batch, scale)[0]
            blocks = kv[batch.block_tables[row, : -(-num_context // kv.shape[3])]]
            keys, values = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, None, :, :num_context]
            attended = torch.nn.functional.scaled_dot_product_attention(
                q[rows].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=_later_hidden(num_queries, num_context, q.device),
                scale=scale,
                enable_gqa=True,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out


def _later_hidden(num_queries: int, num_context: int, device: torch.device) -> torch.Tensor | None:
    """True where a query sees a token; None where the only query sees all."""
    if num_queries == 1:
        return None
    positions = torch.arange(num_context - num_queries, num_context, device=device)
    return torch.arange(num_context, device=device)[None] <= positions[:, None]
