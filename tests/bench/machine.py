"""The floor: what torch reaches here in copying and in matrix multiplication."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.bench.figures import Figure, Say


@dataclass(frozen=True)
class MachineRates:
    """Rates of this machine with the threads that torch has now."""

    copy_bytes_per_second: float
    """Bytes read and written per second by a copy of 256 MiB."""
    gemm_flops_per_second: float
    """bf16 multiply-adds counted as two, at the shape of SmolLM2's gate and up projection, 512 tokens."""


def best_seconds(run: Callable[[], object], *, repeats: int = 10) -> float:
    """The shortest of several runs, after two that do not count."""
    run()
    run()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def machine_figures(say: Say) -> list[Figure]:
    """The rates that others are compared with."""
    say("copy and matrix multiplication in torch")
    rates, threads = measure_machine(), torch.get_num_threads()
    return [
        Figure(f"copy bandwidth, {threads} threads", rates.copy_bytes_per_second / 1e9, "GB/s"),
        Figure(f"bf16 GEMM rate, {threads} threads", rates.gemm_flops_per_second / 1e9, "GFLOP/s"),
    ]


def measure_machine() -> MachineRates:
    """About a second."""
    source = torch.randn(64 * 2**20)
    target = torch.empty_like(source)
    x, weight = torch.randn(512, 576).bfloat16(), torch.randn(3072, 576).bfloat16()
    copy_seconds = best_seconds(lambda: target.copy_(source), repeats=5)
    gemm_seconds = best_seconds(lambda: torch.nn.functional.linear(x, weight), repeats=50)
    return MachineRates(
        copy_bytes_per_second=2 * source.numel() * source.element_size() / copy_seconds,
        gemm_flops_per_second=2 * 512 * 576 * 3072 / gemm_seconds,
    )
