"""The gate of an MLP on whatever device the tensor is."""

import functools
from typing import Protocol

import torch

from kernels.native.native_library import native_library
from kernels.swiglu import reference
from kernels.swiglu.cpu import NativeSwiglu
from kernels.triton_available import has_triton


class Swiglu(Protocol):
    """What every implementation offers."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `silu_mul` of this module."""
        ...


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2 * ff] -> [T, ff]`, gate left of up; in float32, rounded once."""
    return choose_swiglu(gate_up.is_cuda).silu_mul(gate_up)


@functools.cache
def choose_swiglu(is_cuda: bool) -> Swiglu:
    """The fastest implementation that runs here."""
    if is_cuda and has_triton():
        from kernels.swiglu import triton_kernel

        return triton_kernel
    if is_cuda or (library := native_library()) is None:
        return reference
    return NativeSwiglu(library)
