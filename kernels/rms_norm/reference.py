"""RMS norm in plain torch."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim, in float32, rounded once to x's dtype."""
    exact = x.to(torch.float32)
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed).to(x.dtype)
