"""RMS norm by the native kernel."""

import ctypes

import torch

from kernels.native.native_library import IS_FLOAT32, bind, num_threads
from kernels.rms_norm import reference


class NativeRmsNorm:
    """`rms_norm` for bfloat16 and float32 on the CPU; other dtypes go to torch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm = bind(library, "kvmesh_rms_norm", "ipppllllfi")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMS norm over the last dim."""
        if x.dtype not in IS_FLOAT32 or weight.dtype != x.dtype:
            return reference.rms_norm(x, weight, eps)
        _check_width(x, weight)
        x = _with_packed_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        inner_rows = x.shape[1] if x.dim() == 3 else 1
        self._norm(
            IS_FLOAT32[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0] * inner_rows,
            inner_rows,
            x.shape[-1],
            x.stride(0),
            eps,
            num_threads(),
        )
        return out


def _check_width(x: torch.Tensor, weight: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or x.dim() not in (2, 3) or not weight.is_contiguous():
        raise ValueError(
            f"rms_norm takes [T, d] or [T, H, d] and a contiguous weight [d], "
            f"not {list(x.shape)} and {list(weight.shape)}"
        )


def _with_packed_rows(x: torch.Tensor) -> torch.Tensor:
    """X itself where only dim 0 is strided, which the kernel can walk."""
    packed = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if packed else x.contiguous()
