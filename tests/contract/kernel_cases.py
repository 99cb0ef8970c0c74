"""Cases of the kernels' contracts, and what float64 says about them."""

import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st

from kernels.native.native_library import native_library
from kernels.paged_attention.contract import AttentionBatch

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2.5e-2}


def require_native() -> None:
    if native_library() is None:
        pytest.skip("the native kernels cannot be built here")


def interpreted(name: str) -> ModuleType:
    """The Triton kernel of a folder, interpreted on the CPU; a device compiles it in tests/gpu."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device: tests/gpu runs the compiled kernel")
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):  # Triton looks when it is first imported
        importlib.import_module("triton.experimental.gluon.language")  # else by the first launch
        return importlib.import_module(f"kernels.{name}.triton_kernel")


def assert_close(actual: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=tolerance)


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class AttentionCase:
    """A ragged batch: for each sequence its new tokens and its context with them."""

    sequences: tuple[tuple[int, int], ...]
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    first_head: int = 0
    """Heads of the pool in front of those of the case; one more lies behind them."""
    seed: int = 0

    def pool(self, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Blocks of more heads than the case uses, with room for every sequence and one block more."""
        blocks = 1 + sum(-(-context // self.block_size) for _, context in self.sequences)
        heads = self.first_head + self.num_kv_heads + 1
        generator = torch.Generator().manual_seed(self.seed)
        shape = blocks, heads, 2, self.block_size, self.head_dim
        return randn(generator, *shape, dtype=dtype, device=device)

    def view(self, pool: torch.Tensor) -> torch.Tensor:
        return pool[:, self.first_head : self.first_head + self.num_kv_heads]

    def batch(self, pool: torch.Tensor) -> AttentionBatch:
        """Shuffled block tables; their unused entries name no block."""
        device = str(pool.device)
        order = torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(self.seed)).tolist()
        needed = [-(-context // self.block_size) for _, context in self.sequences]
        tables = [[order.pop() for _ in range(number)] for number in needed]
        padded = [table + [10**6] * (max(needed) + 1 - len(table)) for table in tables]
        starts = [0]
        for queries, _ in self.sequences:
            starts.append(starts[-1] + queries)
        contexts = [context for _, context in self.sequences]
        return AttentionBatch(
            torch.stack([int32(table, device) for table in padded]),
            int32(contexts, device),
            int32(starts, device),
            max(queries for queries, _ in self.sequences),
            max(contexts),
        )

    def queries(self, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """A view into a wider projection, as the model makes it."""
        num_tokens, num_heads = sum(n for n, _ in self.sequences), self.num_kv_heads * self.group
        packed = randn(
            torch.Generator().manual_seed(self.seed + 1),
            num_tokens,
            num_heads + 2,
            self.head_dim,
            dtype=dtype,
        )
        return packed.to(device)[:, :num_heads]


def exact_attention(
    q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query by query and head by head in float64."""
    q, kv = q.double().cpu(), kv.double().cpu()
    group, starts = q.shape[1] // kv.shape[1], batch.query_starts.tolist()
    out, lse = (
        torch.zeros(q.shape, dtype=torch.float64),
        torch.full(q.shape[:2], -torch.inf, dtype=torch.float64),
    )
    for sequence, context in enumerate(batch.context_lens.tolist()):
        blocks = batch.block_tables[sequence, : -(-context // kv.shape[3])].tolist()
        keys, values = (torch.cat([kv[block, :, part] for block in blocks], dim=1) for part in (0, 1))
        for row in range(starts[sequence], starts[sequence + 1]):
            visible = context - starts[sequence + 1] + row + 1
            for head in range(q.shape[1]):
                scores = keys[head // group, :visible] @ q[row, head] * scale
                lse[row, head] = torch.logsumexp(scores, 0)
                out[row, head] = torch.softmax(scores, 0) @ values[head // group, :visible]
    return out, lse


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    contexts = draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    sequences = tuple((draw(st.integers(1, c)) if draw(st.booleans()) else 1, c) for c in contexts)
    return AttentionCase(
        sequences,
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 3, 8])),
        head_dim=draw(st.sampled_from([16, 48, 64])),
        block_size=draw(st.sampled_from([8, 16])),
        first_head=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 1000)),
    )
