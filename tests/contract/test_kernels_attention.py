"""Paged attention: every implementation against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    AttentionCase,
    assert_close,
    attention_cases,
    exact_attention,
    interpreted,
    require_native,
)

from kernels.native.native_library import native_library
from kernels.paged_attention.contract import AttentionBatch, PagedAttention, merge_attended
from kernels.paged_attention.cpu import NativeAttention
from kernels.paged_attention.reference import ReferenceAttention

# Triton's interpreter multiplies matrices of bfloat16 by their bits, so half precision stands in for it.
IMPLEMENTATIONS = [
    ("reference", torch.float32),
    ("reference", torch.bfloat16),
    ("native", torch.float32),
    ("native", torch.bfloat16),
    ("triton", torch.float32),
    ("triton", torch.float16),
]
MIXED = AttentionCase(
    ((1, 37), (9, 9), (5, 64), (1, 1), (17, 40)), num_kv_heads=2, group=3, head_dim=64, block_size=16
)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS, ids=lambda param: f"{param[0]}-{param[1]}")
def implementation(request: pytest.FixtureRequest) -> tuple[PagedAttention, torch.dtype]:
    name, dtype = request.param
    if name == "native":
        require_native()
        library = native_library()
        assert library is not None
        return NativeAttention(library), dtype
    if name == "triton":
        attention: PagedAttention = interpreted("paged_attention").TritonAttention()
        return attention, dtype
    return ReferenceAttention(), dtype


Implementation = tuple[PagedAttention, torch.dtype]


@settings(max_examples=12, deadline=None)
@given(case=attention_cases())
def test_any_ragged_batch_is_attended_as_a_dense_computation_says(
    implementation: Implementation, case: AttentionCase
) -> None:
    attention, dtype = implementation
    pool, q, scale = case.pool(dtype), case.queries(dtype), 1 / math.sqrt(case.head_dim)
    kv, batch = case.view(pool), case.batch(pool)
    out, lse = attention.attend_with_lse(q, kv, batch, scale)
    exact_out, exact_lse = exact_attention(q, kv, batch, scale)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close(out, exact_out, dtype)
    assert_close(lse, exact_lse, torch.float32)
    assert torch.equal(attention.attend(q, kv, batch, scale), out)


def test_a_subset_of_the_heads_gives_what_all_heads_give_there(implementation: Implementation) -> None:
    attention, dtype = implementation
    pool, q = MIXED.pool(dtype), MIXED.queries(dtype)
    batch = MIXED.batch(pool)
    everything = attention.attend(q, pool[:, :2], batch, 0.2)
    second = attention.attend(q[:, 3:6], pool[:, 1:2], batch, 0.2)
    torch.testing.assert_close(second, everything[:, 3:6])


def test_parts_of_a_context_merge_into_attention_over_the_whole(implementation: Implementation) -> None:
    attention, dtype = implementation
    case = AttentionCase(((1, 48),), num_kv_heads=2, group=2, head_dim=32, block_size=16)
    pool, q = case.pool(dtype), case.queries(dtype)
    kv, batch = case.view(pool), case.batch(pool)
    whole, whole_lse = attention.attend_with_lse(q, kv, batch, 0.2)
    parts = [
        attention.attend_with_lse(
            q,
            kv,
            AttentionBatch(
                batch.block_tables[:, first:last].contiguous(),
                torch.tensor([(last - first) * 16], dtype=torch.int32),
                batch.query_starts,
                1,
                (last - first) * 16,
            ),
            0.2,
        )
        for first, last in ((0, 1), (1, 3))
    ]
    merged, lse = merge_attended([out for out, _ in parts], [part_lse for _, part_lse in parts])
    assert_close(merged, whole, dtype)
    assert_close(lse, whole_lse, torch.float32)


def test_a_query_that_sees_nothing_gives_zeros(implementation: Implementation) -> None:
    attention, dtype = implementation
    pool = torch.randn(4, 1, 2, 16, 32).to(dtype)
    batch = AttentionBatch(
        torch.zeros((1, 1), dtype=torch.int32),
        torch.tensor([2], dtype=torch.int32),
        torch.tensor([0, 3], dtype=torch.int32),
        3,
        2,
    )
    out, lse = attention.attend_with_lse(torch.randn(3, 2, 32).to(dtype), pool, batch, 1.0)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert lse[0].isneginf().all()
    assert lse[1:].isfinite().all()


def test_tokens_land_in_their_slots_and_nowhere_else(implementation: Implementation) -> None:
    attention, dtype = implementation
    pool = torch.randn(6, 4, 2, 8, 16).to(dtype)
    expected, packed = pool.clone(), torch.randn(11, 7, 16).to(dtype)
    k, v, slots = packed[:, 2:4], packed[:, 4:6], torch.randperm(48)[:11]
    attention.write_kv(k, v, pool[:, 1:3], slots)
    for token, slot in enumerate(slots.tolist()):
        expected[slot // 8, 1:3, 0, slot % 8] = k[token]
        expected[slot // 8, 1:3, 1, slot % 8] = v[token]
    assert torch.equal(pool, expected)
