"""Rotary embedding on whatever device the tensors are."""

import functools
from typing import Protocol

import torch

from kernels.native.native_library import native_library
from kernels.rotary import reference
from kernels.rotary.cpu import NativeRotary
from kernels.triton_available import has_triton


class RotaryEmbedding(Protocol):
    """What every implementation offers."""

    def rotate_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """See `rotate_` of this module."""
        ...


def rotate_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q `[T, Hq, hd]` and k `[T, H, hd]` in place by float32 angles `[T, hd / 2]`.

    Element i of a head is paired with element i + hd / 2 (NeoX style). q and k may be views with any stride
    in dim 0; the dims behind it are contiguous.
    """
    choose_rotary(q.is_cuda).rotate_(q, k, cos, sin)


@functools.cache
def choose_rotary(is_cuda: bool) -> RotaryEmbedding:
    """The fastest implementation that runs here."""
    if is_cuda and has_triton():
        from kernels.rotary import triton_kernel

        return triton_kernel
    if is_cuda or (library := native_library()) is None:
        return reference
    return NativeRotary(library)
