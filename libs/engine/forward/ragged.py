"""The arrays of one step: decodes first, one token each, then prompt chunks; no padding between tokens.

`StepTensors` are the same where the model is, and as hosts hear them.
"""

from collections.abc import Sequence as Rowwise
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import AttentionBatch
from libs.engine.hosting.calls import BeginStep
from libs.engine.hosting.hosted_step import highest_block
from libs.engine.hosting.split_context import ContextPart, split_context
from libs.engine.scheduling.rows import Rows
from libs.engine.scheduling.sequence import Sequence, Span
from libs.model.rotary import Rotary

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of S sequences; shapes as in `AttentionBatch`."""

    token_ids: Int64
    positions: Int64
    slots: Int64
    """Where each token's KV goes: block * block_size + offset."""
    block_tables: Int32
    context_lens: Int32
    query_starts: Int32
    max_query_len: int
    max_context_len: int
    last_tokens: Int64 | None
    """Which of the T tokens want logits, in the order of `rows`; None: all."""
    rows: Int64
    """Rows of the sequences whose next token is chosen."""


def ragged_batch(
    table: Rows, decodes: Rowwise[Sequence], spans: Rowwise[Span], block_size: int
) -> RaggedBatch:
    """The batch of a step. Blocks and tokens of all sequences must be in `table`."""
    rows = np.fromiter((sequence.row for sequence in decodes), dtype=np.int64, count=len(decodes))
    if not spans:
        return _decode_batch(table, rows, block_size)
    span_rows = np.array([span.sequence.row for span in spans], dtype=np.int64)
    span_ends = np.array([span.end for span in spans], dtype=np.int64)
    lens = np.array([span.end - span.first for span in spans], dtype=np.int64)
    wanted = np.array([span.wants_token for span in spans], dtype=bool)
    new_ids = [np.array(span.sequence.token_ids[span.first : span.end], dtype=np.int64) for span in spans]
    new_positions = [np.arange(span.first, span.end) for span in spans]
    decode_lens = table.num_tokens[rows]
    positions = np.concatenate([decode_lens - 1, *new_positions])
    context_lens = np.concatenate([decode_lens, span_ends])
    starts = np.concatenate([np.arange(len(rows) + 1), len(rows) + lens.cumsum()])
    all_rows = np.concatenate([rows, span_rows])
    longest = int(context_lens.max())
    return RaggedBatch(
        token_ids=np.concatenate([table.last_token[rows], *new_ids]),
        positions=positions,
        slots=_slots(table, np.concatenate([rows, span_rows.repeat(lens)]), positions, block_size),
        block_tables=table.block_tables[all_rows, : -(-longest // block_size)],
        context_lens=context_lens.astype(np.int32),
        query_starts=starts.astype(np.int32),
        max_query_len=int(lens.max()),
        max_context_len=longest,
        last_tokens=np.concatenate([np.arange(len(rows)), starts[len(rows) + 1 :][wanted] - 1]),
        rows=np.concatenate([rows, span_rows[wanted]]),
    )


def _decode_batch(table: Rows, rows: Int64, block_size: int) -> RaggedBatch:
    """The usual step: every sequence brings its last token."""
    context_lens = table.num_tokens[rows]
    positions = context_lens - 1
    longest = int(context_lens.max())
    return RaggedBatch(
        token_ids=table.last_token[rows],
        positions=positions,
        slots=_slots(table, rows, positions, block_size),
        block_tables=table.block_tables[rows, : -(-longest // block_size)],
        context_lens=context_lens.astype(np.int32),
        query_starts=np.arange(len(rows) + 1, dtype=np.int32),
        max_query_len=1,
        max_context_len=longest,
        last_tokens=None,
        rows=rows,
    )


def _slots(table: Rows, rows: Int64, positions: Int64, block_size: int) -> Int64:
    blocks = table.block_tables[rows, positions // block_size].astype(np.int64)
    slots: Int64 = blocks * block_size + positions % block_size
    return slots


@dataclass(frozen=True, eq=False)
class StepTensors:
    """Shared by all layers of one step. `own` is this worker's part of a step that uses remote blocks; None:
    every block lies here."""

    rotary: Rotary
    slots: torch.Tensor
    attention: AttentionBatch
    begin: BeginStep
    """The step as hosts hear of it."""
    own: ContextPart | None = None


def step_tensors(
    batch: RaggedBatch, rotary: Rotary, device: torch.device, *, num_own_blocks: int | None, block_size: int
) -> StepTensors:
    """Of a batch; block ids from `num_own_blocks` on are remote, None: none is."""
    begin = BeginStep(
        batch.positions,
        batch.slots,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        batch.max_query_len,
        batch.max_context_len,
        batch.last_tokens,
    )
    attention = AttentionBatch(
        on_device(batch.block_tables, device),
        on_device(batch.context_lens, device),
        on_device(batch.query_starts, device),
        batch.max_query_len,
        batch.max_context_len,
    )
    own = None
    if num_own_blocks is not None and highest_block(begin, block_size) >= num_own_blocks:
        own = split_context(begin, 0, num_own_blocks, block_size, device)
    return StepTensors(rotary, on_device(batch.slots, device), attention, begin, own)


def on_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device; no copy on the CPU, and on CUDA one that the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
