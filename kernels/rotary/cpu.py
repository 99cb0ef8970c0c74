"""Rotary embedding by the native kernel."""

import ctypes

import torch

from kernels.native.native_library import IS_FLOAT32, bind, num_threads
from kernels.rotary import reference


class NativeRotary:
    """`rotate_` for bfloat16 and float32 on the CPU; other dtypes and layouts go to torch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rotate = bind(library, "kvmesh_rotate", "ipllpllpplli")

    def rotate_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate q and k in place."""
        num_tokens, _, head_dim = q.shape
        if k.shape[0] != num_tokens or k.shape[2] != head_dim or cos.shape != (num_tokens, head_dim // 2):
            raise ValueError(
                f"rotate_ takes q, k [T, heads, hd] and angles [T, hd / 2], "
                f"not {list(q.shape)}, {list(k.shape)}, {list(cos.shape)}"
            )
        if (
            q.dtype not in IS_FLOAT32
            or k.dtype != q.dtype
            or not (_has_packed_heads(q) and _has_packed_heads(k))
        ):
            reference.rotate_(q, k, cos, sin)
            return
        cos, sin = _angles(cos), _angles(sin)
        self._rotate(
            IS_FLOAT32[q.dtype],
            q.data_ptr(),
            q.shape[1],
            q.stride(0),
            k.data_ptr(),
            k.shape[1],
            k.stride(0),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            head_dim // 2,
            num_threads(),
        )


def _has_packed_heads(x: torch.Tensor) -> bool:
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]


def _angles(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32).contiguous()
