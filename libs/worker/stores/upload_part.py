"""Blocks on their way to one store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TakeLayers = Callable[[range], torch.Tensor]
"""The blocks of these layers, one layer after another, contiguous. Layers are taken in order, each once."""


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Consecutive blocks of a chain. `parent` is the name of the block before, empty at the chain's start."""

    names: Sequence[bytes]
    parent: bytes
    take_layers: TakeLayers
    request_id: str = ""
    num_output_tokens: int = 0
    """Of the finished sequence that ends with these blocks; 0 for all others."""
