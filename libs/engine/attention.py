"""The attention that an engine uses: the fastest one that takes the shapes of its cache."""

import structlog
import torch

from kernels.paged_attention.choose import choose_paged_attention
from kernels.paged_attention.contract import AttentionBatch, PagedAttention
from kernels.paged_attention.torch_sdpa import TorchAttention
from libs.model.model import Model

_log = structlog.get_logger(__name__)


def fitting_attention(model: Model, kv: torch.Tensor) -> PagedAttention:
    """Tried with one token of zeros on `kv`, a layer of a cache not in use yet; torch's where it is refused.

    `kv` may have some of the model's KV heads only, each with all its queries.

    Fast kernels refuse some head dims and block sizes by ValueError. Better now than in the first step.
    """
    attention = choose_paged_attention(model.device, model.dtype)
    config = model.config
    num_heads = kv.shape[1] * (config.num_heads // config.num_kv_heads)
    heads = torch.zeros((1, num_heads, config.head_dim), dtype=model.dtype, device=model.device)
    kv_heads = heads[:, : kv.shape[1]].contiguous()
    row = torch.ones(1, dtype=torch.int32, device=model.device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=model.device)
    batch = AttentionBatch((row - 1)[None], row, starts, max_query_len=1, max_context_len=1)
    try:
        attention.write_kv(kv_heads, kv_heads, kv, torch.zeros(1, dtype=torch.int64, device=model.device))
        attention.attend(heads, kv, batch, 1.0)
    except ValueError as refusal:
        _log.warning("paged_attention_falls_back_to_torch", reason=str(refusal))
        return TorchAttention()
    return attention
