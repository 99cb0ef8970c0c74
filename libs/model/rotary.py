"""Rotary position embedding: the angles of a step, computed once and used by every layer."""

import math
from dataclasses import dataclass

import torch

from libs.model.config import FrequencyRope, LinearRope, Llama3Rope, ModelConfig


@dataclass(frozen=True)
class Rotary:
    """Angles of one step: `cos` and `sin` are float32 `[num_tokens, head_dim / 2]`."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, scaling applied: float32 `[head_dim / 2]`.

    Float32 from the first operation on, in the order that transformers uses: at position 8000 a difference in
    the last place would already show in the logits.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case None:
            return plain
        case LinearRope(factor=factor):
            return plain / factor
        case FrequencyRope(divisors=divisors):
            return plain / torch.tensor(divisors, dtype=torch.float32)
        case Llama3Rope() as scaling:
            return _llama3(plain, scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    """Llama 3.1's scaling (Meta's `apply_scaling`): a ramp between kept and stretched wavelengths."""
    wavelength = 2 * math.pi / plain
    turns = scaling.original_max_position_embeddings / wavelength
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - ramp) * (plain / scaling.factor) + ramp * plain
    kept = torch.where(turns > scaling.high_freq_factor, plain, between)
    return torch.where(turns < scaling.low_freq_factor, plain / scaling.factor, kept)
