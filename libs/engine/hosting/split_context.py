"""The part of a step that concerns some of its blocks: those of the owner, or those that a host holds for it.

Each query becomes a sequence of its own, whose context is what it may see of these blocks. So causality is
exact: only the block that the query itself stands in can be seen in part, and it is the last one that it
sees.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import AttentionBatch
from libs.engine.hosting.calls import BeginStep
from libs.engine.hosting.hosted_step import tensor_of, used_blocks


@dataclass(frozen=True, eq=False)
class ContextPart:
    """`tokens` (int64) are the step's rows whose k and v are stored in these blocks, in `slots`."""

    batch: AttentionBatch
    tokens: torch.Tensor
    slots: torch.Tensor


def split_context(
    step: BeginStep, first_block: int, end_block: int, block_size: int, device: torch.device
) -> ContextPart:
    """The part of blocks `first_block <= id < end_block`, whose ids in it count from the first one."""
    tables, slots = step.block_tables - first_block, step.slots - first_block * block_size
    num_blocks = end_block - first_block
    is_here = used_blocks(step, block_size) & (tables >= 0) & (tables < num_blocks)
    tokens = np.flatnonzero((slots >= 0) & (slots < num_blocks * block_size))
    order = np.argsort(~is_here, axis=1, kind="stable")  # blocks of this part to the front, in their order
    tables = np.take_along_axis(np.where(is_here, tables, 0), order, axis=1)
    queries = np.diff(step.query_starts)
    rows = np.repeat(np.arange(len(queries)), queries)
    contexts = _seen(step, is_here, rows, queries, block_size)
    longest = int(contexts.max(initial=0))
    batch = AttentionBatch(
        tensor_of(tables[rows, : max(1, -(-longest // block_size))].astype(np.int32), device),
        tensor_of(contexts.astype(np.int32), device),
        torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=longest,
    )
    return ContextPart(batch, tensor_of(tokens, device), tensor_of(slots[tokens], device))


def _seen(
    step: BeginStep,
    is_here: NDArray[np.bool_],
    rows: NDArray[np.int64],
    queries: NDArray[np.int32],
    block_size: int,
) -> NDArray[np.int64]:
    """Tokens in these blocks that each query sees, itself included."""
    positions = np.arange(len(rows)) - step.query_starts[rows] + (step.context_lens - queries)[rows]
    blocks = np.maximum(positions, 0) // block_size
    num_before = np.concatenate([np.zeros((len(is_here), 1), np.int64), is_here.cumsum(1)], axis=1)
    own = np.where(is_here[rows, blocks], positions % block_size + 1, 0)
    seen: NDArray[np.int64] = num_before[rows, blocks] * block_size + own
    return np.where(positions < 0, 0, seen)
