"""The gate of an MLP on whatever device the tensor is."""

import torch

from kernels.swiglu import reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2 * ff] -> [T, ff]`; computed in float32, rounded once."""
    return reference.silu_mul(gate_up)
