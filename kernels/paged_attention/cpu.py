"""Paged attention by the native kernel."""

import ctypes

import torch

from kernels.native.native_library import IS_FLOAT32, bind, num_threads
from kernels.paged_attention.contract import AttentionBatch

MAX_HEAD_DIM = 256


def supports(dtype: torch.dtype) -> bool:
    """Whether the native kernel knows this dtype."""
    return dtype in IS_FLOAT32


class NativeAttention:
    """Paged attention on the CPU for bfloat16 and float32.

    The head_dim is a multiple of 16 up to 256, the block size a multiple of 8. Blocks and slots are trusted:
    a block table or a slot that points outside `kv` reads or writes foreign memory.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = bind(library, "kvmesh_attend", "iplplppplpplllllfi")
        self._write = bind(library, "kvmesh_write_kv", "iplplplplllli")

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
        """Store k and v `[T, H, hd]` in the slots of `kv`."""
        _check_cache(kv, k)
        k, v, slots = _with_packed_heads(k), _with_packed_heads(v), slots.contiguous()
        if k.shape != v.shape or slots.dtype != torch.int64 or slots.shape != k.shape[:1]:
            raise ValueError(
                f"write_kv takes k and v of one shape and an int64 slot for each token, "
                f"not {list(k.shape)}, {list(v.shape)} and {slots.dtype} {list(slots.shape)}"
            )
        self._write(
            IS_FLOAT32[kv.dtype],
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            slots.data_ptr(),
            *k.shape,
            kv.shape[3],
            num_threads(),
        )

    def attend(self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float) -> torch.Tensor:
        """Attended values `[T, Hq, hd]`."""
        return self._run(q, kv, batch, scale, None)

    def attend_with_lse(
        self, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attended values and the log-sum-exp of each row."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        return self._run(q, kv, batch, scale, lse), lse

    def _run(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        _check_cache(kv, q)
        _, num_heads, head_dim = q.shape
        num_kv_heads, block_size = kv.shape[1], kv.shape[3]
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
        q = _with_packed_heads(q)
        tables, contexts, starts = _int32_tensors(batch)
        out = torch.empty(q.shape, dtype=q.dtype)
        self._attend(
            IS_FLOAT32[q.dtype],
            q.data_ptr(),
            q.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            contexts.data_ptr(),
            starts.data_ptr(),
            tables.shape[0],
            num_kv_heads,
            num_heads // num_kv_heads,
            head_dim,
            block_size,
            scale,
            num_threads(),
        )
        return out


def _int32_tensors(batch: AttentionBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Its tables, contexts and starts, contiguous."""
    tables, contexts, starts = batch.block_tables, batch.context_lens, batch.query_starts
    if not tables.dtype == contexts.dtype == starts.dtype == torch.int32:
        raise ValueError(
            f"a batch is of int32 tensors, not {tables.dtype}, {contexts.dtype} and {starts.dtype}"
        )
    return tables.contiguous(), contexts.contiguous(), starts.contiguous()


def _check_cache(kv: torch.Tensor, x: torch.Tensor) -> None:
    _, _, two, block_size, head_dim = kv.shape
    if kv.stride()[1:] != (2 * block_size * head_dim, block_size * head_dim, head_dim, 1) or two != 2:
        raise ValueError(f"kv {list(kv.shape)} is strided in another dim than 0: {kv.stride()}")
    if x.shape[2] != head_dim or x.dtype != kv.dtype:
        raise ValueError(
            f"{x.dtype} heads of {x.shape[2]} do not fit a cache of {kv.dtype} heads of {head_dim}"
        )
    if head_dim % 16 or head_dim > MAX_HEAD_DIM or block_size % 8:
        raise ValueError(
            f"head_dim {head_dim} must be a multiple of 16 up to {MAX_HEAD_DIM}, "
            f"block size {block_size} a multiple of 8"
        )


def _with_packed_heads(x: torch.Tensor) -> torch.Tensor:
    """X itself where only dim 0 is strided, which the kernel can walk."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
