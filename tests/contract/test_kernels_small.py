"""Norm, rotary embedding and gate: every implementation against float64."""

from typing import Any

import pytest
import torch
from kernel_cases import assert_close, interpreted, require_native

from kernels.native.native_library import native_library
from kernels.rms_norm import reference as rms_norm_in_torch
from kernels.rms_norm.cpu import NativeRmsNorm
from kernels.rotary import reference as rotary_in_torch
from kernels.rotary.cpu import NativeRotary
from kernels.swiglu import reference as swiglu_in_torch
from kernels.swiglu.cpu import NativeSwiglu

IN_TORCH = {"rms_norm": rms_norm_in_torch, "rotary": rotary_in_torch, "swiglu": swiglu_in_torch}
NATIVE = {"rms_norm": NativeRmsNorm, "rotary": NativeRotary, "swiglu": NativeSwiglu}


@pytest.fixture(params=["torch", "native", "triton"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def implementation(kind: str, name: str) -> Any:
    if kind == "triton":
        return interpreted(name)
    if kind == "torch":
        return IN_TORCH[name]
    require_native()
    library = native_library()
    assert library is not None
    return NATIVE[name](library)


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (3, 576), (4, 3, 64), (2, 5, 24)])
def test_rows_of_a_strided_tensor_are_normed(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    norm = implementation(kind, "rms_norm")
    x = torch.randn(shape[0], 2, *shape[1:]).to(dtype)[:, 1]
    weight = torch.randn(shape[-1]).to(dtype)
    normed = norm.rms_norm(x, weight, 1e-5)
    assert normed.dtype == dtype
    assert normed.is_contiguous()
    assert_close(normed, exact_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "half"), [(1, 1, 8), (3, 1, 32), (4, 4, 12), (9, 3, 64)]
)
def test_heads_turn_in_place_inside_their_packed_projection(
    kind: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int, half: int
) -> None:
    rotary = implementation(kind, "rotary")
    packed = torch.randn(6, num_heads + 2 * num_kv_heads, 2 * half).to(dtype)
    before, angles = packed.double(), torch.rand(6, half) * 6
    q, k = packed[:, :num_heads], packed[:, num_heads : num_heads + num_kv_heads]
    rotary.rotate_(q, k, angles.cos(), angles.sin())
    turned = num_heads + num_kv_heads
    first, second = before[:, :turned].chunk(2, dim=-1)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    assert_close(packed[:, :turned], exact, dtype)
    assert torch.equal(packed[:, turned:].double(), before[:, turned:])


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 1), (5, 37), (2, 1536)])
def test_the_gate_opens_for_large_values_and_closes_for_small(
    kind: str, dtype: torch.dtype, num_tokens: int, width: int
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * width) * 4).to(dtype)
    gate_up[0, 0] = -80.0
    gate, up = gate_up.double().chunk(2, dim=1)
    opened = implementation(kind, "swiglu").silu_mul(gate_up)
    assert_close(opened, torch.nn.functional.silu(gate) * up, dtype)
