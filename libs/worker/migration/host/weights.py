"""Weights of a module on their way in: pieces of tensors become tensors, and these become layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from libs.model.config import ModelConfig
from libs.model.layer import Layer, layer_bytes
from libs.model.layer_weights import layer_of, layer_tensor_shapes
from libs.model.model import Model
from libs.worker.migration.framing import BadFrame


@dataclass(frozen=True)
class LayerForm:
    """What layers of a model look like. It holds no weights, lest those that left stay in memory."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    """Of one in memory here, with what packing adds."""

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Layer:
        """A layer of its tensors. Takes a while."""
        return layer_of(self.config, tensors, dtype=self.dtype, device=self.device)


def form_of(model: Model) -> LayerForm:
    """The form of a model's layers; its first must be here."""
    return LayerForm(model.config, model.dtype, model.device, layer_bytes(model.layer(0)))


class IncomingWeights:
    """Tensors of the layers of one module. Pieces of a tensor come in order; tensors and layers in any."""

    def __init__(self, form: LayerForm, layers: range) -> None:
        self._shapes, self._dtype, self._layers = layer_tensor_shapes(form.config), form.dtype, layers
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
