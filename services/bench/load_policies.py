"""Two ways to place prompts under one bursty load with shared prefixes, in one run, each on its own mesh: by
load alone with the KV store, against by local prefix hit without a store."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.bench.figures import Figure
from services.bench.mesh_overhead import running_mesh

MESH = ("--prefill", "2", "--decode", "1", "--threads", "1", "--dtype", "bfloat16", "--num-blocks", "512")
LOAD = (
    *("--arrivals", "bursty", "--burstiness", "0.25", "--rate", "2.5", "--num", "120", "--seed", "7"),
    *("--prefix-tokens", "512", "--suffix-tokens", "64", "--output-tokens", "4", "--ignore-eos"),
    *("--num-prefixes", "24", "--zipf", "1.1"),
)
MAX_SHARE = 0.6
"""Of the work, that one of two prefill workers may get."""
SETTINGS = {
    "prefix_affinity, no store": ("--policy", "prefix_affinity", "--stores", "0"),
    "least_load": ("--policy", "least_load", "--stores", "1"),
    "predicted_ttft": ("--policy", "predicted_ttft", "--stores", "1"),
}
BASELINE = "prefix_affinity, no store"


@dataclass(frozen=True)
class Outcome:
    """One policy under the load."""

    ttft_p99_seconds: float
    ttft_mean_seconds: float
    cached_share: float
    largest_share: float
    """Of the prompt tokens computed, by the busiest prefill worker."""
    num_failed: int


def measure_load(say: Callable[[str], None]) -> list[Figure]:
    """About two minutes; the load's pace is fixed, so a slow machine queues."""
    outcomes: dict[str, Outcome] = {}
    for name, flags in SETTINGS.items():
        say(f"{name}: 120 bursty requests over 24 prefixes")
        with running_mesh(*MESH, *flags) as url:
            outcomes[name] = _run(url)
    figures: list[Figure] = []
    base = outcomes[BASELINE]
    for name, seen in outcomes.items():
        reference = None if name == BASELINE else base
        p99 = reference.ttft_p99_seconds * 1e3 if reference else None
        mean = reference.ttft_mean_seconds * 1e3 if reference else None
        most = 100 * MAX_SHARE if reference else None
        figures += [
            Figure(f"TTFT p99, {name}", seen.ttft_p99_seconds * 1e3, "ms", p99, BASELINE),
            Figure(f"TTFT mean, {name}", seen.ttft_mean_seconds * 1e3, "ms", mean, BASELINE),
            Figure(f"busiest prefill worker, {name}", 100 * seen.largest_share, "% of work", at_most=most),
            Figure(f"prompt tokens found, {name}", 100 * seen.cached_share, "%"),
            Figure(f"failed requests, {name}", seen.num_failed, "", at_most=0),
        ]
    return figures


def _run(url: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="kvmesh-load-") as folder:
        output = Path(folder, "report.json")
        command = [sys.executable, "-m", "loadtest", "--url", url, *LOAD, "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(output.read_text())
    work = _computed_tokens(url)
    ttft = report["time_to_first_token_seconds"]
    return Outcome(
        ttft_p99_seconds=ttft["p99"],
        ttft_mean_seconds=ttft["mean"],
        cached_share=report["tokens"]["cached_share"] or 0.0,
        largest_share=max(work) / max(1.0, sum(work)),
        num_failed=report["requests"]["failed"] + report["requests"]["cut_off"],
    )


def _computed_tokens(url: str) -> list[float]:
    """Prompt tokens run and not found, by prefill worker."""
    services = httpx.get(f"{url}/v1/mesh").json()["services"]
    addresses = [s["http_address"] for s in services if s["kind"] == "prefill_worker"]
    return [
        _sample(text, "kvmesh_prompt_tokens_total") - _sample(text, "kvmesh_prefix_cache_hits_total")
        for text in (httpx.get(f"{address}/metrics").text for address in addresses)
    ]


def _sample(text: str, stem: str) -> float:
    rows = (line for line in text.splitlines() if line.replace("{", " ").partition(" ")[0] == stem)
    return sum(float(row.rpartition(" ")[2]) for row in rows)
