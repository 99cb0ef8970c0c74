"""Torch's attention, which takes over where no faster kernel runs, against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import AttentionCase, assert_close, attention_cases

from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention
from kernels.paged_attention.torch_sdpa import TorchAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=15, deadline=None)
@given(case=attention_cases())
def test_torch_attends_as_the_reference(dtype: torch.dtype, case: AttentionCase) -> None:
    pool, q, scale = case.pool(dtype), case.queries(dtype), 1 / math.sqrt(case.head_dim)
    kv, batch = case.view(pool), case.batch(pool)
    out = TorchAttention().attend(q, kv, batch, scale)
    assert out.dtype == dtype
    assert_close(out, ReferenceAttention().attend(q, kv, batch, scale), dtype)


def test_rows_that_see_nothing_give_zeros() -> None:
    case = AttentionCase(((3, 3),), num_kv_heads=1, group=2, head_dim=16, block_size=8)
    pool, q = case.pool(torch.float32), case.queries(torch.float32)
    batch = case.batch(pool)
    short = AttentionBatch(batch.block_tables, torch.tensor([2], dtype=torch.int32), batch.query_starts, 3, 2)
    out = TorchAttention().attend(q, case.view(pool), short, 0.25)
    assert not out[0].any()
    assert out[1:].isfinite().all()
