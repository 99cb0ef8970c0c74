"""What only the native kernels can get wrong: memory never written, many tiles, deep and tall products."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import AttentionCase, assert_close, exact_attention, require_native

from kernels.linear.cpu import PackedGatedLinear, PackedLinear
from kernels.native.native_library import native_library
from kernels.paged_attention.cpu import NativeAttention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def attention() -> NativeAttention:
    require_native()
    library = native_library()
    assert library is not None
    return NativeAttention(library)


def with_unwritten_memory(case: AttentionCase, pool: torch.Tensor) -> torch.Tensor:
    """The pool with NaN wherever no token of the case lies."""
    written = torch.full_like(pool, math.nan)
    tables = case.batch(pool).block_tables
    for sequence, (_, context) in enumerate(case.sequences):
        for token in range(context):
            block, offset = tables[sequence, token // case.block_size], token % case.block_size
            written[block, :, :, offset] = pool[block, :, :, offset]
    return written


@st.composite
def wide_cases(draw: st.DrawFn) -> AttentionCase:
    contexts = draw(st.lists(st.integers(1, 160), min_size=1, max_size=3))
    return AttentionCase(
        tuple((draw(st.sampled_from([1, 2, c, (c + 1) // 2])), c) for c in contexts if c > 1) or ((1, 1),),
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 4, 5, 6, 7, 9, 12, 20])),
        head_dim=draw(st.sampled_from([16, 32, 80, 128, 256])),
        block_size=draw(st.sampled_from([8, 24, 40])),
        seed=draw(st.integers(0, 1000)),
    )


@DTYPES
def test_memory_that_holds_no_token_is_never_part_of_a_result(dtype: torch.dtype) -> None:
    require_native()
    library = native_library()
    assert library is not None
    kernel = NativeAttention(library)

    @given(case=wide_cases())
    def run(case: AttentionCase) -> None:
        pool, q, scale = case.pool(dtype), case.queries(dtype), 1 / math.sqrt(case.head_dim)
        expected, expected_lse = exact_attention(q, case.view(pool), case.batch(pool), scale)
        holes = with_unwritten_memory(case, pool)
        out, lse = kernel.attend_with_lse(q, case.view(holes), case.batch(pool), scale)
        assert_close(out, expected, dtype)
        assert_close(lse, expected_lse, torch.float32)

    run()


@DTYPES
def test_contexts_of_many_tiles_and_stretches_are_attended_whole(
    attention: NativeAttention, dtype: torch.dtype
) -> None:
    case = AttentionCase(
        ((70, 300), (1, 1), (1, 257), (64, 64), (2, 129)), num_kv_heads=1, group=3, head_dim=64, block_size=16
    )
    pool, q = case.pool(dtype), case.queries(dtype)
    expected, _ = exact_attention(q, case.view(pool), case.batch(pool), 0.125)
    assert_close(attention.attend(q, case.view(pool), case.batch(pool), 0.125), expected, dtype)


def test_scores_far_apart_neither_overflow_nor_vanish(attention: NativeAttention) -> None:
    case = AttentionCase(((1, 150), (150, 150)), num_kv_heads=1, group=2, head_dim=16, block_size=8)
    pool, q = case.pool(torch.float32) * 40, case.queries(torch.float32) * 40
    expected, expected_lse = exact_attention(q, case.view(pool), case.batch(pool), 1.0)
    out, lse = attention.attend_with_lse(q, case.view(pool), case.batch(pool), 1.0)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-3)


def test_a_rows_result_does_not_depend_on_the_chunk_it_comes_in(attention: NativeAttention) -> None:
    whole = AttentionCase(((120, 120),), num_kv_heads=1, group=3, head_dim=64, block_size=16)
    chunk = AttentionCase(((50, 120),), num_kv_heads=1, group=3, head_dim=64, block_size=16)
    pool, q = whole.pool(torch.float32), whole.queries(torch.float32)
    everything = attention.attend(q, whole.view(pool), whole.batch(pool), 0.125)
    last = attention.attend(q[70:], chunk.view(pool), chunk.batch(pool), 0.125)
    assert torch.equal(last, everything[70:])


@pytest.mark.parametrize(
    ("kv", "heads"),
    [
        (torch.zeros(2, 1, 2, 12, 16), torch.zeros(1, 1, 16)),  # blocks of 12
        (torch.zeros(2, 1, 2, 8, 24), torch.zeros(1, 1, 24)),  # head_dim 24
        (torch.zeros(2, 1, 2, 8, 512), torch.zeros(1, 1, 512)),
        (torch.zeros(2, 2, 2, 8, 16).transpose(1, 2), torch.zeros(1, 1, 16)),  # strided inside
        (torch.zeros(2, 1, 2, 8, 16), torch.zeros(1, 1, 32)),  # heads of another size
        (torch.zeros(2, 1, 2, 8, 16).bfloat16(), torch.zeros(1, 1, 16)),
    ],
)
def test_a_cache_that_the_kernel_cannot_walk_is_refused(
    attention: NativeAttention, kv: torch.Tensor, heads: torch.Tensor
) -> None:
    with pytest.raises(ValueError):
        attention.write_kv(heads, heads, kv, torch.zeros(1, dtype=torch.int64))


def test_a_batch_of_another_integer_type_is_refused(attention: NativeAttention) -> None:
    case = AttentionCase(((1, 5),), num_kv_heads=1, group=1, head_dim=16, block_size=8)
    pool, q = case.pool(torch.float32), case.queries(torch.float32)
    batch = replace(case.batch(pool), context_lens=torch.tensor([5]))
    with pytest.raises(ValueError, match="int32"):
        attention.attend(q, case.view(pool), batch, 1.0)


@DTYPES
@pytest.mark.parametrize("depth", [2047, 2050, 4500])
def test_products_deeper_than_one_pass_are_summed_whole(dtype: torch.dtype, depth: int) -> None:
    require_native()
    library = native_library()
    assert library is not None
    weight, x = torch.randn(70, depth).div(depth**0.5).to(dtype), torch.randn(200, depth).to(dtype)
    exact = x.double() @ weight.double().T
    assert_close(PackedLinear(library, weight).in_float32(x), exact, torch.float32)
    gate, up = exact.chunk(2, dim=1)
    assert_close(PackedGatedLinear(library, weight)(x), torch.nn.functional.silu(gate) * up, dtype)


def test_a_rows_product_does_not_depend_on_the_rows_beside_it() -> None:
    require_native()
    library = native_library()
    assert library is not None
    layer, x = PackedLinear(library, torch.randn(90, 300)), torch.randn(100, 300)
    everything = layer(x)
    for first, last in ((0, 1), (3, 10), (17, 64)):
        assert torch.equal(layer(x[first:last]), everything[first:last])


def test_rows_outside_the_weight_are_refused() -> None:
    require_native()
    library = native_library()
    assert library is not None
    layer = PackedLinear(library, torch.randn(10, 4))
    with pytest.raises(IndexError, match="not in"):
        layer.rows(torch.tensor([3, 10]))
