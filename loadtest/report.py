"""From records to figures. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.record import Record

HELD_BACK_SECONDS = 0.05
"""A request that is sent later than this after its time was held back by the test itself."""


@dataclass(frozen=True)
class Targets:
    """What a good answer keeps; None: not asked for."""

    first_token_seconds: float | None = None
    output_token_seconds: float | None = None
    """Mean over the tokens after the first."""
    total_seconds: float | None = None

    def __bool__(self) -> bool:
        return any(
            t is not None for t in (self.first_token_seconds, self.output_token_seconds, self.total_seconds)
        )

    def are_met(self, record: Record) -> bool:
        """Whether the answer came whole and in time."""
        first_seconds = record.first_token_seconds
        pairs = (
            # An answer without text counts from its end.
            (record.total_seconds if first_seconds is None else first_seconds, self.first_token_seconds),
            (record.seconds_per_output_token, self.output_token_seconds),
            (record.total_seconds, self.total_seconds),
        )
        return record.is_good and all(
            target is None or (took is None or took <= target) for took, target in pairs
        )


def report(
    records: Sequence[Record], *, end_seconds: float, targets: Targets, warmup_seconds: float = 0.0
) -> dict[str, Any]:
    """All figures of the requests due after the warm-up; `end_seconds` is when the test ended."""
    counted = [record for record in records if record.due_seconds >= warmup_seconds]
    good = [record for record in counted if record.is_good]
    ends = [record.end_seconds for record in counted if record.end_seconds is not None]
    spent_seconds = max([*ends, warmup_seconds]) - warmup_seconds if ends else end_seconds - warmup_seconds
    return {
        "seconds": round(max(0.0, spent_seconds), 3),
        "requests": _requests(counted, good),
        "errors": dict(Counter(record.error for record in counted if record.error).most_common()),
        "time_to_first_token_seconds": distribution(r.first_token_seconds for r in good),
        "inter_token_latency_seconds": distribution(gap for r in good for gap in r.gaps_seconds),
        "time_per_output_token_seconds": distribution(r.seconds_per_output_token for r in good),
        "end_to_end_seconds": distribution(r.total_seconds for r in good),
        "throughput": {
            "requests_per_second": _per(len(good), spent_seconds),
            "output_tokens_per_second": _per(sum(r.num_output_tokens for r in counted), spent_seconds),
            "prompt_tokens_per_second": _per(sum(r.num_prompt_tokens or 0 for r in good), spent_seconds),
        },
        "tokens": _tokens(good),
        "goodput": _goodput(counted, targets, spent_seconds) if targets else None,
    }


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles (nearest rank) of the values that are there; None without any."""
    there = sorted(value for value in values if value is not None)
    if not there:
        return None
    figures = {f"p{rank}": there[max(0, math.ceil(rank / 100 * len(there)) - 1)] for rank in (50, 90, 99)}
    figures = {"mean": sum(there) / len(there), **figures, "max": there[-1]}
    return {name: round(value, 6) for name, value in figures.items()} | {"count": len(there)}


def _requests(counted: Sequence[Record], good: Sequence[Record]) -> dict[str, Any]:
    held_back = [r for r in counted if r.held_back_seconds > HELD_BACK_SECONDS]
    return {
        "due": len(counted),
        "succeeded": len(good),
        "failed": sum(bool(r.error) for r in counted),
        "cut_off": sum(not (r.is_good or r.error) for r in counted),
        "held_back": len(held_back),
        "longest_held_back_seconds": round(max((r.held_back_seconds for r in held_back), default=0.0), 3),
    }


def _tokens(good: Sequence[Record]) -> dict[str, Any]:
    counted = [r for r in good if r.num_prompt_tokens is not None]
    with_cached = [r for r in counted if r.num_cached_tokens is not None]
    num_cached = sum(r.num_cached_tokens or 0 for r in with_cached)
    return {
        "prompt": sum(r.num_prompt_tokens or 0 for r in counted) if counted else None,
        "output": sum(r.num_output_tokens for r in good),
        "cached": num_cached if with_cached else None,
        "cached_share": _share(num_cached, sum(r.num_prompt_tokens or 0 for r in with_cached)),
    }


def _goodput(counted: Sequence[Record], targets: Targets, spent_seconds: float) -> dict[str, Any]:
    num_met = sum(targets.are_met(record) for record in counted)
    return {
        "requests_per_second": _per(num_met, spent_seconds),
        "share": _share(num_met, len(counted)),
        "targets": {
            "time_to_first_token_seconds": targets.first_token_seconds,
            "time_per_output_token_seconds": targets.output_token_seconds,
            "end_to_end_seconds": targets.total_seconds,
        },
    }


def _per(amount: float, seconds: float) -> float:
    return round(amount / seconds, 4) if seconds > 0 else 0.0


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
