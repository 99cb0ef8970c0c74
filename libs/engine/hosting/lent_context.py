"""What a step's queries see of blocks that a host lends: of each sequence only some blocks lie there.

Each query becomes a sequence of its own, whose context is what it may see here. So causality is exact: only
the block that the query itself stands in can be seen in part, and it is the last one that it sees.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.paged_attention.contract import AttentionBatch
from libs.engine.hosting.calls import BeginStep
from libs.engine.hosting.hosted_step import BadCall, tensor_of, used_blocks


@dataclass(frozen=True)
class LentContext:
    """`tokens` (int64) are the step's rows whose k and v are stored here, in `slots`."""

    batch: AttentionBatch
    tokens: torch.Tensor
    slots: torch.Tensor


def lent_context(
    begun: BeginStep, first_block: int, num_blocks: int, block_size: int, device: torch.device
) -> LentContext:
    """The part of a step that concerns blocks `first_block <= id < first_block + num_blocks`.

    Raises BadCall where the step has higher ids.
    """
    is_lent = used_blocks(begun, block_size) & (begun.block_tables >= first_block)
    slots = begun.slots - first_block * block_size
    highest = max(
        begun.block_tables[is_lent].max(initial=-1) - first_block, slots.max(initial=-1) // block_size
    )
    if first_block < 0 or highest >= num_blocks:
        raise BadCall(f"blocks up to {highest} from {first_block} on; {num_blocks} are lent")
    tokens = np.flatnonzero(slots >= 0)
    order = np.argsort(~is_lent, axis=1, kind="stable")  # lent ones to the front, in their order
    tables = np.where(
        np.take_along_axis(is_lent, order, 1),
        np.take_along_axis(begun.block_tables, order, 1) - first_block,
        0,
    )
    queries = np.diff(begun.query_starts)
    rows = np.repeat(np.arange(len(queries)), queries)
    contexts = _seen(begun, is_lent, rows, queries, block_size)
    num_seen_blocks = -(-int(contexts.max(initial=1)) // block_size)
    batch = AttentionBatch(
        tensor_of(tables[rows, : max(1, num_seen_blocks)].astype(np.int32), device),
        tensor_of(contexts.astype(np.int32), device),
        torch.arange(len(rows) + 1, dtype=torch.int32, device=device),
        max_query_len=1,
        max_context_len=int(contexts.max(initial=0)),
    )
    return LentContext(batch, tensor_of(tokens, device), tensor_of(slots[tokens], device))


def _seen(
    begun: BeginStep,
    is_lent: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    rows: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
    queries: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    block_size: int,
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Lent tokens that each query sees, itself included."""
    positions = np.arange(len(rows)) - begun.query_starts[rows] + (begun.context_lens - queries)[rows]
    blocks = np.maximum(positions, 0) // block_size
    num_before = np.concatenate([np.zeros((len(is_lent), 1), np.int64), is_lent.cumsum(1)], axis=1)
    own = np.where(is_lent[rows, blocks], positions % block_size + 1, 0)
    seen: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = num_before[rows, blocks] * block_size + own
    return np.where(positions < 0, 0, seen)
