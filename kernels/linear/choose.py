"""Which linear layer fits a weight's device and dtype."""

import torch

from kernels.linear.contract import GatedLinear, Linear
from kernels.linear.reference import TorchGatedLinear, TorchLinear


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A weight `[N, K]` in the form that multiplies fastest where it lies."""
    return TorchLinear(weight, bias)


def pack_gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> GatedLinear:
    """A weight `[2 * ff, K]`, gate above up, in the form that multiplies fastest where it lies."""
    return TorchGatedLinear(weight, bias)
