"""Which linear layer fits a weight's device and dtype."""

import torch

from kernels.linear.contract import GatedLinear, Linear
from kernels.linear.cpu import PackedGatedLinear, PackedLinear, supports
from kernels.linear.reference import TorchGatedLinear, TorchLinear
from kernels.native.native_library import native_library


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A weight `[N, K]` in the form that multiplies fastest where it lies; the caller may drop its own."""
    if weight.device.type == "cpu" and supports(weight) and (library := native_library()) is not None:
        return PackedLinear(library, weight, bias)
    return TorchLinear(weight, bias)


def pack_gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> GatedLinear:
    """A weight `[2 * ff, K]`, gate above up, in the form that multiplies fastest where it lies."""
    if weight.device.type == "cpu" and supports(weight) and (library := native_library()) is not None:
        return PackedGatedLinear(library, weight, bias)
    return TorchGatedLinear(weight, bias)
