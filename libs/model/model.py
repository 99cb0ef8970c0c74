"""One decoder-only model as the pieces that a step is made of; attention itself lies between them.

All activations are ragged, `[num_tokens, ...]`: tokens of many sequences in one row of tokens, no batch
dimension.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from kernels.linear.contract import Linear
from kernels.rms_norm.choose import rms_norm
from kernels.rotary.choose import rotate_
from libs.model.config import ModelConfig
from libs.model.errors import LayerAway, SourceChanged, WrongLayers
from libs.model.layer import Layer
from libs.model.rotary import Rotary, inverse_frequencies

__all__ = ["Layer", "Model", "Weights"]


@dataclass(frozen=True)
class Weights:
    """All weights of a model. `embedding` None: tied, the embedding of a token is its row of `head`."""

    embedding: torch.Tensor | None
    layers: Mapping[int, Layer]
    """By index; those that are away are missing."""
    final_norm: torch.Tensor
    head: Linear


class Model:
    """The pieces of a forward pass, for an engine that owns the KV cache and the order of steps.

    Not one piece changes the model, so threads may share it. `fingerprint` is equal on two machines exactly
    when config, weights and dtype are. Layers can leave and come back: that makes other models, which share
    all other weights and the fingerprint. `read_layers` reads layers that left
    again, bit for bit as they were, for any thread, or raises SourceChanged; None: that cannot be done.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        fingerprint: str,
        read_layers: Callable[[range], dict[int, Layer]] | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.fingerprint = fingerprint
        self._read_layers = read_layers
        self._inverse_frequencies = inverse_frequencies(config).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.weights.final_norm.dtype

    @property
    def device(self) -> torch.device:
        """Where weights lie and activations are expected."""
        return self.weights.final_norm.device

    def layer(self, layer: int) -> Layer:
        """The weights of one layer.

        Raises:
            LayerAway: they are not here, or the model has no such layer.
        """
        weights = self.weights.layers.get(layer)
        if weights is None:
            here = sorted(self.weights.layers)
            raise LayerAway(f"the weights of layer {layer} are not in this model, which holds layers {here}")
        return weights

    def without_layers(self, layers: range) -> "Model":
        """The model without these layers. Their memory is free once no one holds this model or the layers.

        Raises:
            LayerAway: one of them is not here.
        """
        for layer in layers:
            self.layer(layer)
        return self._with({index: one for index, one in self.weights.layers.items() if index not in layers})

    def with_layers(self, layers: Mapping[int, Layer]) -> "Model":
        """The model with these layers too, in place of those it has under their numbers.

        Raises:
            WrongLayers: the model has no layer of that number, or weights are of another dtype or device.
        """
        for index, layer in layers.items():
            if not 0 <= index < self.config.num_layers:
                raise WrongLayers(f"there is no layer {index} among the model's {self.config.num_layers}")
            kind, own = (layer.attention_norm.dtype, layer.attention_norm.device), (self.dtype, self.device)
            if kind != own:
                raise WrongLayers(f"layer {index} is {kind[0]} on {kind[1]}, the model {own[0]} on {own[1]}")
        return self._with(dict(sorted({**self.weights.layers, **layers}.items())))

    def reload_layers(self, layers: range) -> dict[int, Layer]:
        """These layers read again from where the model was loaded, bit for bit the same; for `with_layers`.

        Takes as long as the disk and packing do, so call it in a thread of its own.

        Raises:
            SourceChanged: the files are gone or others now, or the model was not loaded from any.
            WrongLayers: the model has no such layers.
        """
        if layers and not 0 <= min(layers) <= max(layers) < self.config.num_layers:
            raise WrongLayers(f"{layers} are not layers of the model, which has {self.config.num_layers}")
        if self._read_layers is None:
            raise SourceChanged("this model was made in memory; there is nothing to read its layers from")
        return self._read_layers(layers)

    def _with(self, layers: Mapping[int, Layer]) -> "Model":
        weights = replace(self.weights, layers=layers)
        return Model(self.config, weights, fingerprint=self.fingerprint, read_layers=self._read_layers)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states `[T, d]` of int64 token ids `[T]`."""
        if self.weights.embedding is None:
            return self.weights.head.rows(token_ids)
        return torch.nn.functional.embedding(token_ids, self.weights.embedding)

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Angles of int64 positions `[T]`, for `attention_inputs` of every layer of the same step."""
        angles = torch.outer(positions.to(torch.float32), self._inverse_frequencies)
        return Rotary(angles.cos(), angles.sin())

    def attention_inputs(
        self, layer: int, hidden: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[T, Hq, hd]`, k and v `[T, Hkv, hd]` of hidden states `[T, d]`, q and k rotated.

        They may be views into one packed result: heads and head_dim are contiguous, tokens are strided.
        """
        config, weights = self.config, self.layer(layer)
        packed = weights.qkv(rms_norm(hidden, weights.attention_norm, config.rms_norm_eps))
        heads = packed.view(hidden.shape[0], config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q = rms_norm(q, weights.q_norm, config.rms_norm_eps)
            k = rms_norm(k, weights.k_norm, config.rms_norm_eps)
        rotate_(q, k, rotary.cos, rotary.sin)
        return q, k, v

    def attention_output(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Hidden states after attention: `hidden [T, d]` plus the projection of `attended [T, Hq, hd]`."""
        return self.layer(layer).attention_output.add(attended.flatten(1), hidden)

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[T, d]` after the gated MLP of a layer."""
        weights = self.layer(layer)
        normed = rms_norm(hidden, weights.mlp_norm, self.config.rms_norm_eps)
        return weights.down.add(weights.gate_up(normed), hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits `[N, vocab_size]` of the last layer's hidden states `[N, d]`."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return self.weights.head.in_float32(normed)
