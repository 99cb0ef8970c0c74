"""RMS norm on whatever device the tensors are."""

import functools
from typing import Protocol

import torch

from kernels.native.native_library import native_library
from kernels.rms_norm import reference
from kernels.rms_norm.cpu import NativeRmsNorm
from kernels.triton_available import has_triton


class RmsNorm(Protocol):
    """What every implementation offers."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `rms_norm` of this module."""
        ...


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of `[T, d]` or `[T, H, hd]` over the last dim, in float32, rounded once to x's dtype.

    Any stride in dim 0 is fine; the result is contiguous.
    """
    return choose_rms_norm(x.is_cuda).rms_norm(x, weight, eps)


@functools.cache
def choose_rms_norm(is_cuda: bool) -> RmsNorm:
    """The fastest implementation that runs here."""
    if is_cuda and has_triton():
        from kernels.rms_norm import triton_kernel

        return triton_kernel
    if is_cuda or (library := native_library()) is None:
        return reference
    return NativeRmsNorm(library)
