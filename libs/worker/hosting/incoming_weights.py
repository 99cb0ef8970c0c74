"""Weights of a module on their way in: pieces of tensors become tensors, and these become layers. Pure."""

from collections.abc import Mapping
from math import prod

import torch

from libs.model.config import ModelConfig
from libs.model.layer_weights import layer_tensor_shapes
from libs.worker.hosting.frames import BadFrame


class IncomingWeights:
    """Tensors of the layers of one module. Pieces of a tensor come in order; tensors and layers in any."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, layers: range) -> None:
        self._shapes, self._dtype, self._layers = layer_tensor_shapes(config), dtype, layers
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}
        self._num_taken: dict[tuple[int, str], int] = {}

    def take(self, layer: int, name: str, first_byte: int, piece: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The tensors of the layer if this piece completes it, else nothing. Raises BadFrame."""
        shape = self._shapes.get(name)
        if layer not in self._layers or shape is None:
            raise BadFrame(f"tensor {name!r} of layer {layer} is none of layers {self._layers}")
        num_taken, end = self._num_taken.get((layer, name), 0), first_byte + piece.numel()
        num_bytes = prod(shape) * self._dtype.itemsize
        if piece.dtype != torch.uint8 or first_byte != num_taken or end > num_bytes:
            raise BadFrame(f"bytes {first_byte} to {end} of {num_bytes} after {num_taken} of {name}")
        tensors = self._tensors.setdefault(layer, {})
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=self._dtype)
        tensors[name].view(-1).view(torch.uint8)[first_byte:end] = piece
        self._num_taken[layer, name] = end
        is_whole = all(
            self._num_taken.get((layer, one), 0) == prod(of) * self._dtype.itemsize
            for one, of in self._shapes.items()
        )
        return self._tensors.pop(layer) if is_whole else {}
