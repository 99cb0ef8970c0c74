"""The migration coordinator on against off, on real workers with a share of the cores each.

Two cores bound what four workers can gain together. With `--device-share` each behaves like a slower device
that has a memory of its own: what an idle one does not use is lost, unless modules of busy ones are there.
"""

import math
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.bench.balance_load import Phase, Seen, moves_in, run_phase, wait_for_all
from tests.bench.figures import Figure, Say
from tests.bench.mesh import running_mesh

AIM = 1.3
SHARE = 0.25
MAX_STEP_TOKENS = 512
NUM_BLOCKS, NUM_SMALL_BLOCKS = 1024, 160
WORKERS = (
    *("--prefill", "2", "--decode", "2", "--stores", "0", "--threads", "1", "--dtype", "bfloat16"),
    # Steps of a quarter, so that they take as long as those of a whole device.
    *("--device-share", f"{SHARE}", "--max-num-batched-tokens", f"{MAX_STEP_TOKENS}"),
    *("--drain-timeout-seconds", "2"),
)
POOLS = "[prefill_worker]\nnum_blocks = {}\n[decode_worker]\nnum_blocks = {}\n"
PHASE_SECONDS = 45.0
"""Some ten of them pass until modules lie where a new load wants them."""
SKEWED = (
    Phase("long prompts", prompt_tokens=1024, output_tokens=12, seconds=PHASE_SECONDS, num_clients=12),
    Phase("long answers", prompt_tokens=64, output_tokens=192, seconds=PHASE_SECONDS, num_clients=24),
)
PACE = 0.75
"""Of the rate at which the mesh without moves answered long prompts: peaks are compared where neither is
saturated. Decode workers would show none of it: their steps go on however few sequences are in them."""
PACED_SECONDS = 8.0
CROWDED = Phase(
    "long answers, small pool", prompt_tokens=192, output_tokens=256, seconds=24.0, num_clients=48
)
"""Decode workers have room for a few of its sequences each, from the beginning."""
LAYERS_ONLY, HEADS_ONLY = ("--no-moves-heads",), ("--no-moves-layers",)
"""What is short is compute in the one case, memory in the other."""
ON, OFF = "--automatic", "--no-automatic"
WORDS = {ON: "on", OFF: "off"}
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Outcome:
    """The skewed load on one mesh."""

    phases: list[Seen]
    paced: Seen
    paced_rate: float
    """Requests a second."""

    @property
    def tokens_per_second(self) -> float:
        """Over all phases, which take equally long."""
        return sum(one.tokens_per_second for one in self.phases) / len(self.phases)


def measure_balance(say: Say) -> list[Figure]:
    """Less than six minutes."""
    off = _skewed(OFF, say)
    on = _skewed(ON, say, off.paced_rate)
    crowded_off, crowded_on = (_crowded(switch, say) for switch in (OFF, ON))
    return [*skewed_figures(off, on), *crowded_figures(crowded_off, crowded_on)]


def _skewed(switch: str, say: Say, paced_rate: float | None = None) -> Outcome:
    """First prefill workers are short, then they have time again, then decode workers are short."""
    long_prompts, long_answers = SKEWED
    with _mesh(NUM_BLOCKS, "--max-model-len", "1280", switch, *LAYERS_ONLY) as url:
        prompts = _run(url, long_prompts, switch, say)
        rate = paced_rate or PACE * max(1, len(prompts.first_token_seconds)) / long_prompts.seconds
        paced = replace(
            long_prompts, seconds=PACED_SECONDS, num_clients=1024, rate=rate, seed=long_prompts.seed + 1
        )
        at_pace = _run(url, paced, switch, say)
        return Outcome([prompts, _run(url, long_answers, switch, say)], at_pace, rate)


def _run(url: str, phase: Phase, switch: str, say: Say) -> Seen:
    load = f"{phase.rate:.2f} a second" if phase.rate else f"{phase.num_clients} clients"
    say(f"coordinator {WORDS[switch]}: {phase.name}, {load}")
    return run_phase(url, phase)


def _crowded(switch: str, say: Say) -> Seen:
    with _mesh(NUM_SMALL_BLOCKS, "--max-model-len", "512", switch, *HEADS_ONLY) as url:
        return _run(url, CROWDED, switch, say)


@contextmanager
def _mesh(num_decode_blocks: int, *flags: str) -> Generator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(POOLS.format(NUM_BLOCKS, num_decode_blocks))
        config.flush()
        with running_mesh(*WORKERS, *flags, "--config", config.name) as url:
            wait_for_all(url, num_workers=4)
            yield url


def skewed_figures(off: Outcome, on: Outcome) -> list[Figure]:
    """On against off, by phase and together."""
    figures = [
        Figure(
            "skewed load: tokens/s, coordinator on",
            on.tokens_per_second,
            "tokens/s",
            off.tokens_per_second,
            "off",
            at_least=AIM * off.tokens_per_second,
        ),
    ]
    for phase, without, with_moves in zip(SKEWED, off.phases, on.phases, strict=True):
        figures += _phase_figures(phase.name, without, with_moves)
    paced = f"{SKEWED[0].name} at {on.paced_rate:.2f}/s"
    peak = off.paced.settled.peak_utilization
    return [
        *figures,
        Figure(
            f"{paced}: peak utilization", on.paced.settled.peak_utilization, "", peak, "off", at_most=peak
        ),
        *_latency_figures(paced, off.paced, on.paced),
    ]


def _phase_figures(name: str, off: Seen, on: Seen) -> list[Figure]:
    return [
        Figure(f"{name}: tokens/s", on.tokens_per_second, "tokens/s", off.tokens_per_second, "off"),
        *_latency_figures(name, off, on),
        Figure(f"{name}: peak utilization", on.peak_utilization, "", off.peak_utilization, "off"),
        Figure(f"{name}: moves", len(moves_in(on.rounds)), ""),
    ]


def _latency_figures(name: str, off: Seen, on: Seen) -> list[Figure]:
    return [
        _p99(f"{name}: TTFT p99", off.first_token_seconds, on.first_token_seconds),
        _p99(f"{name}: between two tokens p99", off.gap_seconds, on.gap_seconds),
        Figure(f"{name}: failed requests", off.num_failed + on.num_failed, "", at_most=0),
    ]


def crowded_figures(off: Seen, on: Seen) -> list[Figure]:
    """Sequences that run at once where memory is short."""
    without, with_moves = off.mean_running(DECODE), on.mean_running(DECODE)
    return [
        Figure(
            f"{CROWDED.name}: sequences running at once",
            with_moves,
            "",
            without,
            "off",
            at_least=AIM * without,
        ),
        *_phase_figures(CROWDED.name, off, on),
    ]


def _p99(name: str, off: list[float], on: list[float]) -> Figure:
    return Figure(name, 1e3 * _rank(on, 0.99), "ms", 1e3 * _rank(off, 0.99), "off")


def _rank(values: list[float], rank: float) -> float:
    """Nearest; nan without values."""
    return sorted(values)[max(0, math.ceil(rank * len(values)) - 1)] if values else math.nan
