"""One decoder-only model as the pieces that a step is made of; attention itself lies between them.

All activations are ragged, `[num_tokens, ...]`: tokens of many sequences in one row of tokens, no batch
dimension.
"""

from dataclasses import dataclass

import torch

from kernels.linear.contract import GatedLinear, Linear
from kernels.rms_norm.choose import rms_norm
from kernels.rotary.choose import rotate_
from libs.model.config import ModelConfig
from libs.model.rotary import Rotary, inverse_frequencies


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


@dataclass(frozen=True)
class Weights:
    """All weights of a model. `embedding` None: tied, the embedding of a token is its row of `head`."""

    embedding: torch.Tensor | None
    layers: list[Layer]
    final_norm: torch.Tensor
    head: Linear


class Model:
    """The pieces of a forward pass, for an engine that owns the KV cache and the order of steps.

    Not one piece changes the model, so threads may share it. `fingerprint` is equal on two machines exactly
    when config, weights and dtype are.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, fingerprint: str) -> None:
        self.config = config
        self.weights = weights
        self.fingerprint = fingerprint
        self._inverse_frequencies = inverse_frequencies(config).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return self.weights.final_norm.dtype

    @property
    def device(self) -> torch.device:
        """Where weights lie and activations are expected."""
        return self.weights.final_norm.device

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
        config, weights = self.config, self.weights.layers[layer]
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
        return self.weights.layers[layer].attention_output.add(attended.flatten(1), hidden)

    def mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[T, d]` after the gated MLP of a layer."""
        weights = self.weights.layers[layer]
        normed = rms_norm(hidden, weights.mlp_norm, self.config.rms_norm_eps)
        return weights.down.add(weights.gate_up(normed), hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits `[N, vocab_size]` of the last layer's hidden states `[N, d]`."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return self.weights.head.in_float32(normed)
