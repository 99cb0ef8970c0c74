"""Linear layers as torch has them (oneDNN and MKL on CPUs, cuBLAS on CUDA)."""

import torch

from kernels.swiglu.choose import silu_mul


class TorchLinear:
    """A plain weight `[N, K]` and torch's own product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + self(x)`."""
        return residual + self(x)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """`self(x)` as float32 (torch's product rounds to x's dtype first)."""
        return self(x).to(torch.float32)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight."""
        return torch.nn.functional.embedding(indices, self.weight)


class TorchGatedLinear:
    """Gate and up as one product, then `silu_mul`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(x @ gate.T) * (x @ up.T)`."""
        return silu_mul(torch.nn.functional.linear(x, self.weight, self.bias))
