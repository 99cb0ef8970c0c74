"""The gate of an MLP in plain torch."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, in float32, rounded once."""
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
