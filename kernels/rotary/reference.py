"""Rotary embedding in plain torch."""

import torch


def rotate_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates the halves of each head of q and k `[T, H, hd]` in place, in float32, rounded once."""
    cos, sin = cos[:, None], sin[:, None]
    for x in (q, k):
        first, second = x.to(torch.float32).chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
