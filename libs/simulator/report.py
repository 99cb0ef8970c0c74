"""What came of a replay, in figures."""

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from libs.simulator.job import Job


class Spread(msgspec.Struct, frozen=True):
    """Seconds, over all requests that were served."""

    mean: float
    p50: float
    p99: float


class HitRates(msgspec.Struct, frozen=True):
    """Shares of all prompt tokens, by where their KV came from; what is missing to 1 was computed."""

    device: float
    """The instance's own pool."""
    memory: float
    """A store's."""
    disk: float


class Report(msgspec.Struct, frozen=True):
    """One policy's replay."""

    policy: str
    num_requests: int
    num_refused: int
    """Prompts that fit no instance."""
    makespan_seconds: float
    """From the first arrival to the last token."""
    output_tokens_per_second: float
    ttft_seconds: Spread
    token_seconds: Spread
    """Between two tokens of a request, its mean."""
    hit_rates: HitRates
    work_shares: dict[str, float]
    """Of all seconds that prefill instances computed, by instance."""


def make_report(
    policy: str,
    jobs: Iterable[Job],
    refused: int,
    busy_seconds: Mapping[str, float],
    block_size: int,
) -> Report:
    """Add up what happened to the jobs that were served."""
    served = list(jobs)
    num_tokens = sum(job.request.num_input_tokens for job in served)
    makespan = max((job.finished_at for job in served), default=0.0)
    work = sum(busy_seconds.values())

    return Report(
        policy=policy,
        num_requests=len(served) + refused,
        num_refused=refused,
        makespan_seconds=makespan,
        output_tokens_per_second=_per(sum(job.request.num_output_tokens for job in served), makespan),
        ttft_seconds=_spread([job.ttft_seconds for job in served]),
        token_seconds=_spread(
            [
                (job.finished_at - job.prefilled_at) / (job.request.num_output_tokens - 1)
                for job in served
                if job.request.num_output_tokens > 1
            ]
        ),
        hit_rates=HitRates(
            _per(block_size * sum(job.num_here_blocks for job in served), num_tokens),
            _per(block_size * sum(job.num_memory_blocks for job in served), num_tokens),
            _per(block_size * sum(job.num_disk_blocks for job in served), num_tokens),
        ),
        work_shares={name: _per(busy, work) for name, busy in busy_seconds.items()},
    )


def _per(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _spread(seconds: list[float]) -> Spread:
    if not seconds:
        return Spread(0.0, 0.0, 0.0)
    p50, p99 = np.percentile(seconds, [50, 99])
    return Spread(float(np.mean(seconds)), float(p50), float(p99))


def as_json(reports: list[Report]) -> str:
    """For programs: one object by policy, indented."""
    text = msgspec.json.encode({report.policy: report for report in reports})
    return msgspec.json.format(text, indent=2).decode()


def as_table(reports: list[Report]) -> str:
    """For people: one line for each policy."""
    heads = f"{'policy':<18}{'TTFT mean':>11}{'p50':>9}{'p99':>9}{'own pool':>10}{'memory':>8}{'disk':>7}"
    lines = [heads + f"{'largest share':>15}{'refused':>9}"]
    for report in reports:
        ttft, hits = report.ttft_seconds, report.hit_rates
        lines.append(
            f"{report.policy:<18}{ttft.mean:>9.3f} s{ttft.p50:>7.3f} s{ttft.p99:>7.3f} s"
            f"{hits.device:>10.1%}{hits.memory:>8.1%}{hits.disk:>7.1%}"
            f"{max(report.work_shares.values(), default=0.0):>15.1%}{report.num_refused:>9}"
        )
    return "\n".join(lines)
