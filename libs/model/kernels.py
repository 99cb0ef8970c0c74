"""The compute that a model's pieces call, in torch."""

import torch


class Linear:
    """`x [M, K] -> [M, N]` with a weight `[N, K]` and an optional bias `[N]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A weight in the form that multiplies fastest on its device."""
    return Linear(weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dim, in float32, rounded to x's dtype before the weight as transformers does."""
    exact = x.to(torch.float32)
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def rotate_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates q and k `[T, H, hd]` in place by angles `[T, hd / 2]`, halves paired (NeoX style)."""
    cos, sin = cos.to(q.dtype)[:, None], sin.to(q.dtype)[:, None]
    for x in (q, k):
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        x.copy_(rotated)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2 * ff] -> [T, ff]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
