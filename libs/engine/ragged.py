"""The arrays of one step: decodes first, one token each, then prompt chunks; no padding between tokens."""

from collections.abc import Sequence as Rowwise
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.engine.rows import Rows
from libs.engine.sequence import Sequence

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Tokens `first <= position < end` of a sequence, to be computed in this step."""

    sequence: Sequence
    first: int
    end: int

    @property
    def wants_token(self) -> bool:
        """Whether the next token is chosen from this chunk's last row."""
        return self.end == self.sequence.num_tokens


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
