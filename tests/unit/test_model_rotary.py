"""Angles: equal to transformers' to the last bit, whatever the scaling."""

import pytest
import torch
import transformers
from random_model import random_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from libs.model.config import Architecture, FrequencyRope, LinearRope, Llama3Rope, ModelConfig, RopeScaling
from libs.model.rotary import inverse_frequencies


def config(theta: float, head_dim: int, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        architecture=Architecture.LLAMA,
        num_layers=1,
        hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=8,
        vocab_size=8,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        max_position_embeddings=131072,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("linear", LinearRope(4.0)),
        ("llama3", Llama3Rope(8.0, 1.0, 4.0, 8192)),
        ("llama3", Llama3Rope(32.0, 1.0, 4.0, 8192)),
    ],
)
def test_scaled_frequencies_are_those_of_transformers(
    theta: float, head_dim: int, kind: str, scaling: LinearRope | Llama3Rope
) -> None:
    parameters = {"rope_type": kind, "rope_theta": theta} | scaling.__dict__
    theirs = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=parameters
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    assert attention_factor == 1.0
    assert torch.equal(inverse_frequencies(config(theta, head_dim, scaling)), expected)


def test_divisors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(config(10000.0, 4))
    divided = inverse_frequencies(config(10000.0, 4, FrequencyRope((1.0, 8.0))))
    assert torch.equal(divided, plain / torch.tensor([1.0, 8.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_exact_at_far_positions_whatever_the_models_dtype(dtype: torch.dtype) -> None:
    model = random_model(config(500000.0, 64), 0, dtype)
    position = 131071
    rotary = model.rotary(torch.tensor([0, position]))
    assert rotary.cos.dtype == rotary.sin.dtype == torch.float32
    assert torch.equal(rotary.cos[0], torch.ones(32))
    exact = position * inverse_frequencies(model.config).double()
    assert (rotary.sin[1].double() - exact.sin()).abs().max() < 0.01  # float32 holds 131071 rad to 1/128


def test_a_dot_product_depends_on_the_distance_only() -> None:
    model = random_model(config(10000.0, 64), 0, torch.float32)
    hidden = model.embed(torch.tensor([1, 2]))
    scores = []
    for first in (0, 7, 300):
        rotary = model.rotary(torch.tensor([first, first + 5]))
        q, k, _ = model.attention_inputs(0, hidden, rotary)
        scores.append((q[1] * k[0]).sum())
    torch.testing.assert_close(scores[1], scores[0], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(scores[2], scores[0], atol=1e-3, rtol=1e-4)
