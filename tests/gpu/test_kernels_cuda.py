"""The kernels' contracts on a real CUDA device, with the implementation that is chosen there."""

import math

import pytest
import torch
from hypothesis import given
from kernel_cases import AttentionCase, assert_close, attention_cases, exact_attention, randn

from kernels.linear.choose import pack_linear
from kernels.paged_attention.choose import choose_paged_attention
from kernels.rms_norm.choose import rms_norm
from kernels.rotary import reference as rotary_in_torch
from kernels.rotary.choose import rotate_
from kernels.swiglu.choose import silu_mul

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LARGE = AttentionCase(
    ((1, 4097), (300, 1500), (1, 17), (129, 129)), num_kv_heads=2, group=3, head_dim=64, block_size=16
)


@pytest.fixture(scope="module", params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def check_attention(case: AttentionCase, dtype: torch.dtype) -> None:
    attention, scale = choose_paged_attention(torch.device("cuda"), dtype), 1 / math.sqrt(case.head_dim)
    pool, q = case.pool(dtype, "cuda"), case.queries(dtype, "cuda")
    kv, batch = case.view(pool), case.batch(pool)
    out, lse = attention.attend_with_lse(q, kv, batch, scale)
    exact_out, exact_lse = exact_attention(q, kv, batch, scale)
    assert_close(out.cpu(), exact_out, dtype)
    assert_close(lse.cpu(), exact_lse, torch.float32)
    assert torch.equal(attention.attend(q, kv, batch, scale), out)


@given(case=attention_cases())
def test_any_ragged_batch_is_attended_as_a_dense_computation_says(
    dtype: torch.dtype, case: AttentionCase
) -> None:
    check_attention(case, dtype)


def test_long_contexts_and_long_chunks_are_attended(dtype: torch.dtype) -> None:
    check_attention(LARGE, dtype)


@pytest.mark.parametrize("head_dim", [80, 96, 128, 256])
def test_heads_of_every_usual_width_fit_the_device(dtype: torch.dtype, head_dim: int) -> None:
    check_attention(AttentionCase(((1, 130), (70, 90)), 2, 4, head_dim, 16, first_head=1), dtype)


def test_tokens_land_in_their_slots_and_nowhere_else(dtype: torch.dtype) -> None:
    pool = torch.randn(6, 4, 2, 8, 16).to(dtype)
    expected, packed, slots = pool.clone(), torch.randn(11, 7, 16).to(dtype), torch.randperm(48)[:11]
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 8, 1:3, 0, slot % 8] = packed[token, 2:4]
        expected[slot // 8, 1:3, 1, slot % 8] = packed[token, 4:6]
    pool, packed = pool.cuda(), packed.cuda()
    attention = choose_paged_attention(pool.device, dtype)
    attention.write_kv(packed[:, 2:4], packed[:, 4:6], pool[:, 1:3], slots.cuda())
    assert torch.equal(pool.cpu(), expected)


@pytest.mark.parametrize("shape", [(5, 37), (3, 4096), (4, 3, 64)])
def test_rows_are_normed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(*shape).to(dtype).cuda(), torch.randn(shape[-1]).to(dtype).cuda()
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    assert_close(rms_norm(x, weight, 1e-5), exact * weight.double(), dtype)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "half"), [(3, 1, 32), (9, 3, 12), (32, 8, 64)])
def test_heads_turn_in_place_inside_their_packed_projection(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, half: int
) -> None:
    packed = randn(torch.Generator(), 6, num_heads + 2 * num_kv_heads, 2 * half, dtype=dtype, device="cuda")
    exact, angles = packed.double(), torch.rand(6, half, device="cuda") * 6
    turned = num_heads + num_kv_heads
    rotate_(packed[:, :num_heads], packed[:, num_heads:turned], angles.cos(), angles.sin())
    rotary_in_torch.rotate_(exact[:, :num_heads], exact[:, num_heads:turned], angles.cos(), angles.sin())
    assert_close(packed, exact, dtype)


def test_the_gate_is_that_of_float64(dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * 1537).to(dtype).cuda()
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close(silu_mul(gate_up), torch.nn.functional.silu(gate) * up, dtype)


def test_linear_layers_multiply_and_give_their_weight_back(dtype: torch.dtype) -> None:
    weight, x = (torch.randn(95, 64) / 8).to(dtype).cuda(), torch.randn(7, 64).to(dtype).cuda()
    layer = pack_linear(weight)
    assert_close(layer(x), x.double() @ weight.double().T, dtype)
    assert torch.equal(layer.weight, weight)
