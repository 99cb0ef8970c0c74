"""A load by `loadtest`, and what its mesh looks like meanwhile: loads as the gateway hears them, rounds as
the coordinator sees them."""

import json
import math
import signal
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
MAX_REQUESTS = 600
"""More than there is time for."""
_START_SECONDS = 60.0
_GRACE_SECONDS = 6.0
_CUT = 130
"""How `loadtest` ends when it is cut."""


@dataclass(frozen=True)
class Phase:
    """Requests of one kind: at a `rate`, or where it is 0, by `num_clients` that each ask again at once."""

    name: str
    prompt_tokens: int
    output_tokens: int
    seconds: float
    """Then it is cut."""
    num_clients: int = 1024
    rate: float = 0.0
    seed: int = 7


@dataclass
class Seen:
    """One phase on one mesh."""

    phase: Phase
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of each request, as `loadtest --records` writes them."""
    loads: list[dict[str, dict[str, Any]]] = field(default_factory=list[dict[str, dict[str, Any]]])
    """At each look, by worker."""
    rounds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Of the coordinator's loop, the oldest first."""

    @property
    def num_failed(self) -> int:
        """Requests that ended with an error; those that the end of the phase cut did not."""
        return sum(bool(one["error"]) for one in self.records)

    @property
    def num_answer_tokens(self) -> int:
        """Of all answers, also those that were cut."""
        return sum(len(one["token_seconds"]) for one in self.records)

    @property
    def tokens_per_second(self) -> float:
        """Of prompts that got their first token, and of answers."""
        num_begun = sum(bool(one["token_seconds"]) for one in self.records)
        return (num_begun * self.phase.prompt_tokens + self.num_answer_tokens) / self.phase.seconds

    @property
    def first_token_seconds(self) -> list[float]:
        """From sending, of each request."""
        return [one["token_seconds"][0] - one["sent_seconds"] for one in self.records if one["token_seconds"]]

    @property
    def gap_seconds(self) -> list[float]:
        """Between the pieces of each answer."""
        return [later - sooner for one in self.records for sooner, later in pairwise(one["token_seconds"])]

    @property
    def settled(self) -> "Seen":
        """Its rounds of the second half alone, in which loads of before are forgotten."""
        return Seen(self.phase, self.records, self.loads, self.rounds[len(self.rounds) // 2 :])

    @property
    def peak_utilization(self) -> float:
        """Of the busiest device in each round, on average; as the loop weighs it."""
        peaks = [max(d["utilization"] for d in one["devices"]) for one in self.rounds if one["devices"]]
        return statistics.fmean(peaks or [0.0])

    def mean_running(self, kind: str) -> float:
        """Sequences in steps of all workers of that kind together, on average; the first half of the phase,
        in which modules move, is left out."""
        counts = [sum(load["num_running"] for load in _of(kind, look)) for look in self.loads]
        return statistics.fmean(counts[len(counts) // 2 :] or [0])


def wait_for_all(url: str, *, num_workers: int) -> None:
    """Until so many workers and the coordinator's loop take part: a pair of workers is enough for /ready."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        answer = httpx.get(f"{url}/v1/mesh/explain", params={"rounds": 1})
        rounds = answer.json()["rounds"] if answer.status_code == 200 else []
        if rounds and len(rounds[0]["devices"]) == num_workers:
            return
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(f"the coordinator does not see {num_workers} workers within {_START_SECONDS:g} s")


def run_phase(url: str, phase: Phase) -> Seen:
    """Returns when its time is over."""
    seen, began_unix = Seen(phase), time.time()
    pace = ("--rate", f"{phase.rate:g}") if phase.rate else ("--rate", "inf")
    num_requests = math.ceil(phase.rate * phase.seconds) if phase.rate else MAX_REQUESTS
    with tempfile.TemporaryDirectory(prefix="kvmesh-balance-") as folder:
        records = Path(folder, "records.jsonl")
        command = [
            *(sys.executable, "-m", "loadtest", "--url", url, "--ignore-eos", "--seed", str(phase.seed)),
            *("--arrivals", "constant", *pace, "--num", str(num_requests)),
            *("--max-in-flight", str(phase.num_clients), "--prefix-tokens", "0"),
            *("--suffix-tokens", str(phase.prompt_tokens), "--output-tokens", str(phase.output_tokens)),
            *("--records", str(records), "--output", str(Path(folder, "report.json"))),
        ]
        load = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _look_on(url, load, seen)
        finally:
            if load.poll() is None:
                load.send_signal(signal.SIGINT)
            _, said = load.communicate()
        if load.returncode not in (0, _CUT):
            raise RuntimeError(f"the load ended with {load.returncode}: {said}")
        seen.records = [json.loads(line) for line in records.read_text().splitlines()]
    seen.rounds = [one for one in _rounds(url) if one["unix_seconds"] >= began_unix]
    return seen


def moves_in(rounds: Sequence[dict[str, Any]]) -> list[str]:
    """What the loop decided to move, in its words, the oldest first."""
    return [one["decision"] for one in rounds if one["move_id"]]


def _look_on(url: str, load: subprocess.Popen[str], seen: Seen) -> None:
    """Until the load ends, or its time is over. One that comes at a pace ends by itself soon after."""
    grace_seconds = _GRACE_SECONDS if seen.phase.rate else 0.0
    ends_at = time.monotonic() + seen.phase.seconds + grace_seconds
    with httpx.Client(base_url=url) as client:
        while load.poll() is None and time.monotonic() < ends_at:
            services = client.get("/v1/mesh").json()["services"]
            seen.loads.append(
                {one["name"]: one["load"] for one in services if "worker" in one["kind"] and one["load"]}
            )
            time.sleep(LOOK_SECONDS)


def _of(kind: str, look: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [load for name, load in look.items() if name.startswith(kind)]


def _rounds(url: str) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = httpx.get(f"{url}/v1/mesh/explain", params={"rounds": MAX_ROUNDS}).json()[
        "rounds"
    ]
    return rounds[::-1]
