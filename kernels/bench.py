"""How fast the chosen kernels are on this CPU, against torch's own in the same run."""

import time
from collections.abc import Callable
from functools import partial

import torch

from kernels.linear.choose import pack_linear
from kernels.paged_attention.choose import choose_paged_attention
from kernels.paged_attention.contract import AttentionBatch
from kernels.paged_attention.reference import ReferenceAttention

# The head and the attention of SmolLM2-135M.
NUM_OUTPUTS, NUM_INPUTS = 49_152, 576
NUM_QUERY_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16


def measure_kernels() -> dict[str, float]:
    """Figures by name; a ratio above 1 says that ours is the faster one. A few seconds."""
    return _measure_linear() | _measure_attention()


def _best_seconds(run: Callable[[], object], repeats: int = 12) -> float:
    run()
    run()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def _measure_linear() -> dict[str, float]:
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS).bfloat16()
    linear = pack_linear(weight)
    figures: dict[str, float] = {}
    for num_rows in (1, 8, 32, 512):
        x = torch.randn(num_rows, NUM_INPUTS).bfloat16()
        ours = _best_seconds(partial(linear, x))
        theirs = _best_seconds(partial(torch.nn.functional.linear, x, weight))
        name = f"linear {NUM_INPUTS}x{NUM_OUTPUTS}, {num_rows} rows"
        figures[f"{name}: weights read, GB/s"] = weight.numel() * 2 / ours / 1e9
        figures[f"{name}: GFLOP/s"] = 2 * num_rows * weight.numel() / ours / 1e9
        figures[f"{name}: torch's time over ours"] = theirs / ours
    return figures


def _measure_attention() -> dict[str, float]:
    ours = choose_paged_attention(torch.device("cpu"), torch.bfloat16)
    reference = ReferenceAttention()
    figures: dict[str, float] = {}
    for name, num_sequences, num_queries, context in (
        ("decode of 32 sequences at 512 tokens", 32, 1, 512),
        ("prefill of 512 tokens", 1, 512, 512),
    ):
        blocks_each = context // BLOCK_SIZE
        num_blocks = num_sequences * blocks_each
        kv = torch.randn(num_blocks, NUM_KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM).bfloat16()
        q = torch.randn(num_sequences * num_queries, NUM_QUERY_HEADS, HEAD_DIM).bfloat16()
        batch = AttentionBatch(
            block_tables=torch.arange(num_blocks, dtype=torch.int32).view(num_sequences, blocks_each),
            context_lens=torch.full((num_sequences,), context, dtype=torch.int32),
            query_starts=torch.arange(num_sequences + 1, dtype=torch.int32) * num_queries,
            max_query_len=num_queries,
            max_context_len=context,
        )
        seconds = _best_seconds(partial(ours.attend, q, kv, batch, 0.125))
        slow = _best_seconds(partial(reference.attend, q, kv, batch, 0.125), repeats=4)
        figures[f"attention, {name}: us"] = seconds * 1e6
        figures[f"attention, {name}: reference's time over ours"] = slow / seconds
    return figures
