"""One skewed load with the coordinator's loop on and off: long prompts first, long answers later."""

from collections.abc import Sequence

import msgspec
import numpy as np

from libs.balancing.settings import BalancingSettings
from libs.cost.migration import ModelShape
from libs.routing.policies import POLICIES
from libs.simulator.balancing import Balancing
from libs.simulator.cluster import Cluster
from libs.simulator.settings import SimulatorSettings
from libs.simulator.trace import TraceRequest

NUM_KV_HEADS = 8
WEIGHTS_PER_BLOCK = 4
"""Weights of a layer, in blocks of one layer's KV: about those of an 8B model at 512 tokens a block."""


class BalanceReport(msgspec.Struct, frozen=True):
    """What came of it."""

    is_on: bool
    num_requests: int
    makespan_seconds: float
    tokens_per_second: float
    """Of prompts and answers."""
    p99_ttft_seconds: float
    mean_peak_utilization: float
    """The greatest utilization of the devices, on average over the run."""
    num_moves: int


def compare_balancing(settings: SimulatorSettings) -> list[BalanceReport]:
    """Off and on, in this order. Raises ValueError for a load or a cluster that cannot be."""
    requests = skewed_load(settings)
    return [_replay(requests, settings, is_on=is_on) for is_on in (False, True)]


def skewed_load(settings: SimulatorSettings) -> list[TraceRequest]:
    """Half of the requests have prompts of `prefix_tokens` and short answers, then half have short prompts
    and answers of `output_tokens`; none share a prefix."""
    count = settings.requests or 400
    noise = np.random.default_rng(settings.seed)
    arrivals = np.cumsum(noise.exponential(1.0 / settings.requests_per_second, count))
    requests: list[TraceRequest] = []
    for number in range(count):
        is_early = number < count // 2
        num_input = settings.prefix_tokens if is_early else max(1, settings.prefix_tokens // 16)
        num_output = max(1, settings.output_tokens // 16) if is_early else settings.output_tokens
        names = [
            number.to_bytes(8, "big") + block.to_bytes(8, "big")
            for block in range(num_input // settings.block_size)
        ]
        requests.append(TraceRequest(float(arrivals[number] - arrivals[0]), num_input, num_output, names))
    return requests


def model_of(settings: SimulatorSettings) -> ModelShape:
    """A model whose blocks are as large as these flags say. Raises ValueError where none is."""
    head_dim = settings.block_bytes // (settings.layers * settings.block_size * 2 * NUM_KV_HEADS * 2)
    if not head_dim:
        raise ValueError(
            f"blocks of {settings.block_bytes} bytes hold no {NUM_KV_HEADS} KV heads of "
            f"{settings.layers} layers and {settings.block_size} tokens: raise --block-bytes"
        )
    layer_bytes = WEIGHTS_PER_BLOCK * settings.block_bytes // settings.layers
    return ModelShape(
        num_layers=settings.layers,
        num_heads=4 * NUM_KV_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        hidden_size=4 * NUM_KV_HEADS * head_dim,
        element_bytes=2,
        layer_weight_bytes=layer_bytes,
        layer_memory_bytes=layer_bytes,
        block_size=settings.block_size,
    )


def _replay(requests: Sequence[TraceRequest], settings: SimulatorSettings, *, is_on: bool) -> BalanceReport:
    policy = (settings.policy or ("least_load",))[0]
    cluster = Cluster(settings.shape(), POLICIES[policy], seed=settings.seed)
    balancing = Balancing(
        cluster.prefills,
        cluster.decodes,
        model_of(settings),
        BalancingSettings(acts=is_on),
        settings.device_share,
        is_over=lambda: len(cluster.finished) + len(cluster.refused) == len(requests),
        changed=cluster.place_waiting,
    )
    cluster.replay(requests, balancing.first_round(0.0))
    report = cluster.report(policy)
    num_tokens = sum(job.request.num_input_tokens + job.request.num_output_tokens for job in cluster.finished)
    return BalanceReport(
        is_on=is_on,
        num_requests=report.num_requests,
        makespan_seconds=report.makespan_seconds,
        tokens_per_second=num_tokens / report.makespan_seconds if report.makespan_seconds else 0.0,
        p99_ttft_seconds=report.ttft_seconds.p99,
        mean_peak_utilization=float(np.mean(balancing.peaks)) if balancing.peaks else 0.0,
        num_moves=balancing.num_moves,
    )


def balance_table(reports: Sequence[BalanceReport]) -> str:
    """For people: one line each, and how much faster the second is."""
    heads = f"{'loop':<6}{'tokens/s':>10}{'makespan':>12}{'TTFT p99':>12}{'mean peak':>11}{'moves':>7}"
    lines = [heads, *map(_line, reports)]
    off, on = reports
    if off.tokens_per_second:
        lines.append(f"throughput with the loop: {on.tokens_per_second / off.tokens_per_second:.2f} times")
    return "\n".join(lines)


def _line(one: BalanceReport) -> str:
    return (
        f"{'on' if one.is_on else 'off':<6}{one.tokens_per_second:>10.0f}{one.makespan_seconds:>10.1f} s"
        f"{one.p99_ttft_seconds:>10.2f} s{one.mean_peak_utilization:>11.2f}{one.num_moves:>7}"
    )


def balance_json(reports: Sequence[BalanceReport]) -> str:
    """For programs."""
    text = msgspec.json.encode({"on" if one.is_on else "off": one for one in reports})
    return msgspec.json.format(text, indent=2).decode()
