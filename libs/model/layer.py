"""The weights of one layer, and how much memory they take."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from kernels.linear.contract import GatedLinear, Linear


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; `qkv` and `gate_up` are packed by rows, so that each is one product."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_output: Linear
    mlp_norm: torch.Tensor
    gate_up: GatedLinear
    down: Linear


def layer_bytes(layer: Layer) -> int:
    """Bytes of memory that a layer holds: padding and copies that packing made count."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for field in fields(layer)
        for tensor in _tensors(getattr(layer, field.name))
        if (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(storages.values())


def _tensors(part: object) -> Iterator[torch.Tensor]:
    """What a part of a layer holds. The contract of a product tells its weight, not what it keeps beside it
    or in its place, so its attributes are looked through."""
    if isinstance(part, torch.Tensor):
        yield part
    elif part is not None:
        yield from (value for value in vars(part).values() if isinstance(value, torch.Tensor))
