"""What every linear takes and gives."""

from typing import Protocol

import torch


class Linear(Protocol):
    """`x [M, K] -> [M, N]` with the weight `[N, K]` and an optional bias `[N]` of a layer."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight `[N, K]`, equal to the one that was packed; may be a fresh copy."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias `[N]`, if there is one."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias`; x may have any stride in dim 0."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + (x @ weight.T + bias)`, a new tensor, rounded once."""
        ...

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias` as float32 `[M, N]`: logits are not rounded to x's dtype."""
        ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows `[T, K]` of the weight by int64 `[T]`: an embedding tied to this product needs no copy."""
        ...


class GatedLinear(Protocol):
    """`x [M, K] -> silu(x @ gate.T) * (x @ up.T) [M, ff]`, gate above up in one weight `[2 * ff, K]`."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight `[2 * ff, K]`, gate above up; may be a fresh copy."""
        ...

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias `[2 * ff]`, if there is one."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The gated product; x may have any stride in dim 0."""
        ...
