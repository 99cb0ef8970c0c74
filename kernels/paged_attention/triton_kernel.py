"""Paged attention by Triton: online softmax over the keys of one KV head, for a tile of its query rows.

A row is one query of one head of the group, so that all heads of a group share what is read of the cache; a
decoding sequence fills one small tile, a prompt chunk several larger ones.
"""
# Device code is in Triton's language, which has no types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from kernels.paged_attention.contract import AttentionBatch
from kernels.triton_available import LAUNCH_OPTIONS

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = 1.4426950408889634
_MIN_DOT = 16
"""The least number of rows and of keys that a tensor core takes."""
_TILE_BYTES = 16 * 1024
"""Keys of one step; those, their values and the next step's stay in shared memory together."""


class TritonAttention:
    """Paged attention on CUDA for any head_dim, block size and floating dtype."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v `[T, H, hd]` in the slots of `kv`."""
        k, v, slots = _with_packed_heads(k), _with_packed_heads(v), slots.contiguous()
        num_tokens, num_heads, head_dim = k.shape
        if not num_tokens:
            return
        with torch.cuda.device_of(kv):
            _write_kv[(num_tokens,)](
                k,
                v,
                kv,
                slots,
                k.stride(0),
                v.stride(0),
                kv.stride(0),
                NUM_ELEMENTS=num_heads * head_dim,
                COLUMNS=triton.next_power_of_2(num_heads * head_dim),
                HEAD_DIM=head_dim,
                BLOCK_SIZE=kv.shape[3],
                **LAUNCH_OPTIONS,
            )

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        """Attended values `[T, Hq, hd]`."""
        return self._run(q, kv, batch, scale, None)

    def attend_with_lse(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attended values and the log-sum-exp of each row."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return self._run(q, kv, batch, scale, lse), lse

    def _run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        q = _with_packed_heads(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not q.numel():
            return out
        num_kv_heads, head_dim = kv.shape[1], q.shape[2]
        group = q.shape[1] // num_kv_heads
        padded_dim = max(_MIN_DOT, triton.next_power_of_2(head_dim))
        rows, keys = _tile(batch.max_query_len * group, padded_dim * kv.element_size())
        num_tiles = triton.cdiv(batch.max_query_len * group, rows)
        tables = batch.block_tables.contiguous()
        with torch.cuda.device_of(q):
            _attend[num_tiles, num_kv_heads, tables.shape[0]](
                q,
                kv,
                out,
                lse,
                tables,
                batch.context_lens.contiguous(),
                batch.query_starts.contiguous(),
                scale * _LOG2_E,
                q.stride(0),
                out.stride(0),
                kv.stride(0),
                tables.shape[1],
                q.shape[1],
                GROUP=group,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                BLOCK_SIZE=kv.shape[3],
                ROWS=rows,
                KEYS=keys,
                num_stages=2,
                **LAUNCH_OPTIONS,
            )
        return out


def _tile(num_rows: int, row_bytes: int) -> tuple[int, int]:
    """Rows and keys of a tile for at most `num_rows` rows in a sequence and keys of `row_bytes`."""
    keys = min(64, max(_MIN_DOT, _TILE_BYTES // row_bytes))
    return min(keys, max(_MIN_DOT, triton.next_power_of_2(num_rows))), keys


def _with_packed_heads(x: torch.Tensor) -> torch.Tensor:
    """X itself where only dim 0 is strided, which the kernel can walk."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@triton.jit
def _write_kv(
    k,
    v,
    kv,
    slots,
    k_stride,
    v_stride,
    block_stride,
    NUM_ELEMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    element = tl.arange(0, COLUMNS)
    inside = element < NUM_ELEMENTS
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    at = kv + slot // BLOCK_SIZE * block_stride
    at += (head * 2 * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dim
    tl.store(at, tl.load(k + token * k_stride + element, mask=inside), mask=inside)
    tl.store(at + BLOCK_SIZE * HEAD_DIM, tl.load(v + token * v_stride + element, mask=inside), mask=inside)


@triton.jit
def _attend(
    q,
    kv,
    out,
    lse,
    tables,
    context_lens,
    query_starts,
    scale_log2,
    q_stride,
    out_stride,
    block_stride,
    table_width,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile: its rows, with as many keys as the last of them sees."""
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_query = tl.load(query_starts + sequence).to(tl.int64)
    num_queries = (tl.load(query_starts + sequence + 1) - first_query).to(tl.int32)
    if tile * ROWS >= num_queries * GROUP:
        return
    num_before = tl.load(context_lens + sequence) - num_queries
    last_query = tl.minimum(num_queries - 1, (tile * ROWS + ROWS - 1) // GROUP)
    num_visible = num_before + last_query + 1
    row = tile * ROWS + tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    token, is_row = first_query + query, query < num_queries
    dim = tl.arange(0, PADDED_DIM)
    inside = is_row[:, None] & (dim < HEAD_DIM)[None]
    q_at = token[:, None] * q_stride + head[:, None] * HEAD_DIM + dim[None]
    queries = tl.load(q + q_at, mask=inside, other=0.0)
    top, total, attended = _attend_keys(
        queries,
        num_before + query,
        kv,
        block_stride,
        tables + sequence * table_width,
        kv_head,
        num_visible,
        scale_log2,
        HEAD_DIM,
        BLOCK_SIZE,
        KEYS,
    )
    seen = tl.where(total == 0.0, 1.0, total)
    out_at = token[:, None] * out_stride + head[:, None] * HEAD_DIM + dim[None]
    tl.store(out + out_at, (attended / seen[:, None]).to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + token * num_heads + head, (top + tl.log2(seen)) * _LN_2, mask=is_row)


@triton.jit
def _attend_keys(
    queries,
    position,
    kv,
    block_stride,
    table,
    kv_head,
    num_keys,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """For each row, over the keys up to its position: the highest score, in powers of 2, and relative to it
    the sum of their weights and of their weighted values."""
    top = tl.full([queries.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    attended = tl.zeros(queries.shape, tl.float32)
    dim = tl.arange(0, queries.shape[1])
    for start in range(0, num_keys, KEYS):
        key = start + tl.arange(0, KEYS)
        keys, values = _cached(kv, block_stride, table, kv_head, key, num_keys, dim, HEAD_DIM, BLOCK_SIZE)
        # Tensor cores round float32 to 10 bits unless told not to.
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale_log2
        scores = tl.where(key[None] <= position[:, None], scores, -float("inf"))
        top, total, attended = _with_keys(top, total, attended, scores, values)
    return top, total, attended


@triton.jit
def _cached(
    kv,
    block_stride,
    table,
    kv_head,
    key,
    num_keys,
    dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """The keys with these numbers, and their values; zeros from `num_keys` on."""
    is_key = key < num_keys
    block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    key_at = block * block_stride + (kv_head * 2 * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
    inside = is_key[:, None] & (dim < HEAD_DIM)[None]
    keys = tl.load(kv + key_at[:, None] + dim[None], mask=inside, other=0.0)
    values = tl.load(kv + BLOCK_SIZE * HEAD_DIM + key_at[:, None] + dim[None], mask=inside, other=0.0)
    return keys, values


@triton.jit
def _with_keys(top, total, attended, scores, values):
    """One step of the online softmax: these three with more keys, which have these scores and values."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, axis=1)
    attended = attended * decay[:, None]
    attended += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_top, total, attended
