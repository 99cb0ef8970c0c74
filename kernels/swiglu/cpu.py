"""The gate of an MLP by the native kernel."""

import ctypes

import torch

from kernels.native.native_library import IS_FLOAT32, bind, num_threads
from kernels.swiglu import reference


class NativeSwiglu:
    """`silu_mul` for bfloat16 and float32 on the CPU; other dtypes go to torch."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._silu_mul = bind(library, "kvmesh_silu_mul", "ipplli")

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`."""
        if gate_up.dtype not in IS_FLOAT32 or gate_up.dim() != 2 or gate_up.shape[1] % 2:
            return reference.silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype)
        self._silu_mul(
            IS_FLOAT32[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            num_tokens,
            width,
            num_threads(),
        )
        return out
