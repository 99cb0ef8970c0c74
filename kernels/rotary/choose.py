"""Rotary embedding on whatever device the tensors are."""

import torch

from kernels.rotary import reference


def rotate_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q `[T, Hq, hd]` and k `[T, H, hd]` in place by float32 angles `[T, hd / 2]`.

    Element i of a head is paired with element i + hd / 2 (NeoX style). q and k may be views with any stride in
    dim 0; the dims behind it are contiguous.
    """
    reference.rotate_(q, k, cos, sin)
