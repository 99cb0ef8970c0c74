"""What the kernels reach here, against torch in the same run."""

import time
from collections.abc import Callable

import torch

from kernels.linear.choose import pack_linear
from kernels.paged_attention.choose import choose_paged_attention
from kernels.paged_attention.contract import AttentionBatch, PagedAttention
from kernels.paged_attention.torch_sdpa import TorchAttention
from tests.bench.figures import Figure, Say

_SECONDS_EACH = 0.25
_HEAD_DIM, _NUM_KV_HEADS, _GROUP, _BLOCK_SIZE = 64, 3, 3, 16
_SKINNY, _SKINNY_ROWS = (49152, 576), (1, 8, 32)
"""The output head of SmolLM2-135M, the largest weight that its decode step reads."""
_LARGE, _LARGE_ROWS = (3072, 576), 512


def measure_kernels(say: Say) -> list[Figure]:
    """A few seconds, in bfloat16, with the threads that torch has now."""
    say("each kernel against torch")
    return [_figure(name, value) for name, value in (_linear() | _attention()).items()]


def _figure(name: str, value: float) -> Figure:
    title, _, unit = name.rpartition(": ")
    return Figure(title, value, unit)


def _linear() -> dict[str, float]:
    figures: dict[str, float] = {}
    weight = torch.randn(_SKINNY).bfloat16()
    for num_rows in _SKINNY_ROWS:
        ours, torchs = _product_seconds(weight, num_rows)
        name = f"linear {_SKINNY[1]}x{_SKINNY[0]}, {num_rows} row{'s' * (num_rows > 1)}"
        figures[f"{name}: GB/s"] = weight.nbytes / ours / 1e9
        figures[f"{name} against torch: ratio"] = torchs / ours
    weight = torch.randn(_LARGE).bfloat16()
    ours, torchs = _product_seconds(weight, _LARGE_ROWS)
    name = f"linear {_LARGE[1]}x{_LARGE[0]}, {_LARGE_ROWS} rows"
    figures[f"{name}: GFLOP/s"] = 2 * weight.numel() * _LARGE_ROWS / ours / 1e9
    figures[f"{name} against torch: ratio"] = torchs / ours
    return figures


def _product_seconds(weight: torch.Tensor, num_rows: int) -> tuple[float, float]:
    x, layer = torch.randn(num_rows, weight.shape[1]).bfloat16(), pack_linear(weight)
    return _rivals(lambda: layer(x), lambda: torch.nn.functional.linear(x, weight))


def _attention() -> dict[str, float]:
    figures: dict[str, float] = {}
    device, dtype = torch.device("cpu"), torch.bfloat16
    chosen, torchs_own = choose_paged_attention(device, dtype), TorchAttention()
    for name, num_sequences, num_queries, num_context in (
        ("paged attention, decode of 32 x 1024 tokens", 32, 1, 1024),
        ("paged attention, prefill of 512 tokens", 1, 512, 512),
    ):
        q, kv, batch = _attention_case(num_sequences, num_queries, num_context)
        ours, torchs = _rivals(_attends(chosen, q, kv, batch), _attends(torchs_own, q, kv, batch))
        figures[f"{name}: us"] = ours * 1e6
        figures[f"{name}: GB/s of keys and values"] = kv.nbytes / ours / 1e9
        figures[f"{name} against torch: ratio"] = torchs / ours
    return figures


def _attention_case(
    num_sequences: int, num_queries: int, num_context: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    num_blocks = num_context // _BLOCK_SIZE
    shape = num_sequences * num_blocks, _NUM_KV_HEADS, 2, _BLOCK_SIZE, _HEAD_DIM
    q = torch.randn(num_sequences * num_queries, _NUM_KV_HEADS * _GROUP, _HEAD_DIM).bfloat16()
    batch = AttentionBatch(
        torch.randperm(shape[0]).to(torch.int32).view(num_sequences, num_blocks),
        torch.full((num_sequences,), num_context, dtype=torch.int32),
        torch.arange(num_sequences + 1, dtype=torch.int32) * num_queries,
        num_queries,
        num_context,
    )
    return q, torch.randn(shape).bfloat16(), batch


def _attends(
    attention: PagedAttention, q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch
) -> Callable[[], object]:
    return lambda: attention.attend(q, kv, batch, _HEAD_DIM**-0.5)


def _rivals(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """The shortest time of each, taken in turns so that a busy machine slows both."""
    ours()
    theirs()
    best = [float("inf"), float("inf")]
    deadline = time.perf_counter() + _SECONDS_EACH
    while best[1] == float("inf") or time.perf_counter() < deadline:
        for index, run in enumerate((ours, theirs)):
            begin = time.perf_counter()
            run()
            best[index] = min(best[index], time.perf_counter() - begin)
    return best[0], best[1]
