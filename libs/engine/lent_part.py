"""What of a step lies at home when a host lends blocks: tokens to store, and what each query sees."""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.paged_attention.contract import AttentionBatch
from libs.engine.hosting.calls import BeginStep


@dataclass(frozen=True, eq=False)
class LentPart:
    """The home's part of a step some of whose blocks are lent."""

    tokens: torch.Tensor
    """int64: which of the step's tokens have their KV at home, and where."""
    slots: torch.Tensor
    seen: AttentionBatch
    """One sequence per query, of the blocks at home that it sees: so causality is a matter of lengths."""


def lent_part(step: BeginStep, first_lent: int, block_size: int, device: torch.device) -> LentPart | None:
    """None where no block of the step is lent.

    Only the block of a query's own position can be partly filled for it, and it is the last of its table;
    so what is left of the table still is full blocks, and then at most one that is not.
    """
    lens = np.diff(step.query_starts)
    sequence = np.repeat(np.arange(len(lens)), lens)
    tables = step.block_tables[sequence]
    starts = np.arange(tables.shape[1]) * block_size
    num_tokens = np.clip(step.positions[:, None] + 1 - starts, 0, block_size)
    is_own = tables < first_lent
    if is_own[num_tokens > 0].all():
        return None
    contexts = (num_tokens * is_own).sum(axis=1)
    # Own blocks to the front, in order; what follows them is not read.
    order = np.argsort(~is_own | (num_tokens == 0), axis=1, kind="stable")
    own_tables = np.take_along_axis(tables, order, axis=1)
    longest = int(contexts.max())
    tokens = np.flatnonzero(step.slots < first_lent * block_size)
    seen = AttentionBatch(
        torch.from_numpy(np.ascontiguousarray(own_tables[:, : max(1, -(-longest // block_size))])).to(device),
        torch.from_numpy(contexts.astype(np.int32)).to(device),
        torch.arange(len(sequence) + 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=longest,
    )
    return LentPart(
        torch.from_numpy(tokens).to(device), torch.from_numpy(step.slots[tokens]).to(device), seen
    )
