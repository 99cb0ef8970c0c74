"""RMS norm on whatever device the tensors are."""

import torch

from kernels.rms_norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of `[T, d]` or `[T, H, hd]` over the last dim; computed in float32, rounded once to x's dtype."""
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`."""
    return reference.add_rms_norm(x, residual, weight, eps)
