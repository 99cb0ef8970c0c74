"""A load by `loadtest`, and what its mesh looks like meanwhile: loads as the gateway hears them, rounds as
the coordinator sees them."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

LOOK_SECONDS = 0.5
MAX_ROUNDS = 200


@dataclass(frozen=True)
class Phase:
    """Requests of one kind: at a `rate`, or where it is 0, by `num_clients` that each ask again at once."""

    name: str
    prompt_tokens: int
    output_tokens: int
    num_requests: int
    num_clients: int = 1024
    rate: float = 0.0
    seed: int = 7


@dataclass
class Seen:
    """One phase on one mesh."""

    seconds: float = 0.0
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of each request, as `loadtest --records` writes them."""
    loads: list[dict[str, dict[str, Any]]] = field(default_factory=list[dict[str, dict[str, Any]]])
    """At each look, by worker."""
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of the coordinator's loop, the oldest first."""

    @property
    def num_failed(self) -> int:
        """Requests whose answer did not come whole."""
        return sum(bool(one["error"]) or one["was_cancelled"] for one in self.records)

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers."""
        return sum((one["num_prompt_tokens"] or 0) + (one["num_told_tokens"] or 0) for one in self.records)

    @property
    def first_token_seconds(self) -> list[float]:
        """From sending, of each request."""
        return [one["token_seconds"][0] - one["sent_seconds"] for one in self.records if one["token_seconds"]]

    @property
    def gap_seconds(self) -> list[float]:
        """Between the pieces of each answer."""
        return [later - sooner for one in self.records for sooner, later in pairwise(one["token_seconds"])]

    @property
    def peak_utilization(self) -> float:
        """Of the busiest device in each round, on average; as the loop weighs it."""
        return _mean_peak(self.rounds, "utilization")

    @property
    def peak_compute(self) -> float:
        """The same of the part of its busy seconds that a device spends."""
        return _mean_peak(self.rounds, "compute")

    def mean_running(self, kind: str) -> float:
        """Sequences in steps of all workers of that kind together, on average; beginning and end of the load
        left out."""
        counts = [
            sum(load["num_running"] for name, load in look.items() if name.startswith(kind))
            for look in self.loads
        ]
        quarter = len(counts) // 4
        return statistics.fmean(counts[quarter : len(counts) - quarter] or [0])


def run_phase(url: str, phase: Phase) -> Seen:
    """Returns when the last answer is there."""
    seen, began_unix = Seen(), time.time()
    pace = ("--rate", f"{phase.rate:g}") if phase.rate else ("--rate", "inf")
    with tempfile.TemporaryDirectory(prefix="kvmesh-balance-") as folder:
        records, report = Path(folder, "records.jsonl"), Path(folder, "report.json")
        command = [
            *(sys.executable, "-m", "loadtest", "--url", url, "--ignore-eos", "--seed", str(phase.seed)),
            *("--arrivals", "constant", *pace, "--num", str(phase.num_requests)),
            *("--max-in-flight", str(phase.num_clients), "--prefix-tokens", "0"),
            *("--suffix-tokens", str(phase.prompt_tokens), "--output-tokens", str(phase.output_tokens)),
            *("--records", str(records), "--output", str(report)),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as load:
            _look_on(url, load, seen)
            if load.returncode:
                said = load.stderr.read() if load.stderr is not None else ""
                raise RuntimeError(f"the load ended with {load.returncode}: {said}")
        seen.records = [json.loads(line) for line in records.read_text().splitlines()]
        seen.seconds = json.loads(report.read_text())["seconds"]
    seen.rounds = [one for one in _rounds(url) if one["unix_seconds"] >= began_unix]
    return seen


def moves_in(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """What the loop decided to move, in its words, the oldest first."""
    return [one["decision"] for one in rounds if one["move_id"]]


def _look_on(url: str, load: subprocess.Popen[str], seen: Seen) -> None:
    with httpx.Client(base_url=url) as client:
        while True:
            try:
                load.wait(timeout=LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                services = client.get("/v1/mesh").json()["services"]
                seen.loads.append(
                    {one["name"]: one["load"] for one in services if "worker" in one["kind"] and one["load"]}
                )
            else:
                return


def _rounds(url: str) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = httpx.get(f"{url}/v1/mesh/explain", params={"rounds": MAX_ROUNDS}).json()[
        "rounds"
    ]
    return rounds[::-1]


def _mean_peak(rounds: Sequence[dict[str, Any]], what: str) -> float:
    peaks = [max(device[what] for device in one["devices"]) for one in rounds if one["devices"]]
    return statistics.fmean(peaks or [0.0])
