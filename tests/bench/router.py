"""Routing decisions in a cluster of a thousand workers, and the router's memory over many distinct prompts,
measured in a process of their own: `python -m tests.bench.router` prints JSON."""

import gc
import json
import subprocess
import sys
import time
from itertools import accumulate
from random import Random

import psutil  # type: ignore[import-untyped]  # it has no stubs

from libs.bus.messages.generation import Place
from libs.bus.messages.kv_events import Stored, Tier
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.fetch import FetchCost
from libs.cost.load import WorkerLoad
from libs.cost.prefill import PrefillCost
from libs.kv.names import NAME_BYTES
from libs.kv_events.view import KvView
from libs.routing.candidates import Draw
from libs.routing.policies import POLICIES
from services.router.choosing import Choosing, Match
from services.router.matching import Matching
from services.router.view import ClusterView
from tests.bench.figures import Figure, Say

NUM_PREFILL = NUM_DECODE = 500
NUM_STORES = 4
NUM_BLOCKS = 128
"""Of each prompt: 2048 tokens."""
NUM_PREFIXES = 2000
NUM_DECISIONS = 2000
BLOCK_SIZE = 16
NUM_DISTINCT_PROMPTS = 100_000
NUM_SETTLING_PROMPTS = 50_000
"""Until the tables have found their sizes: the view is full after a tenth of them."""
NUM_DISTINCT_BLOCKS = 16
MAX_KNOWN_BLOCKS = 50_000

DECISION_AIM_MS = 1.0
MEMORY_AIM = 1.05
"""After 100k prompts more, as a multiple of before."""


def measure_router(say: Say) -> list[Figure]:
    """About half a minute."""
    say("decisions of each policy among 1000 workers, then 100k distinct prompts")
    command = [sys.executable, "-m", "tests.bench.router"]
    seen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    figures = [
        Figure(
            f"{policy}: decision p99",
            took["clock"],
            "ms",
            took["processor"],
            "processor time",
            at_most=DECISION_AIM_MS,
        )
        for policy, took in seen["decision_ms"].items()
    ]
    after, before = seen["after_mib"], seen["settled_mib"]
    name = "memory after 100k more distinct prompts"
    return [*figures, Figure(name, after, "MiB", before, "before them", at_most=MEMORY_AIM * before)]


class Cluster:
    """Workers with random loads, and who holds which of the popular prefixes."""

    def __init__(self, num_prefill: int, num_decode: int, max_known_blocks: int, seed: int = 1) -> None:
        self.chance = Random(seed)
        self.view = ClusterView(stale_after_seconds=1e9, placement_seconds=5.0, max_placements=65536)
        self.held = KvView(max_known_blocks)
        kinds = [ServiceKind.PREFILL_WORKER] * num_prefill + [ServiceKind.DECODE_WORKER] * num_decode
        self.workers = {f"w{number}": kind for number, kind in enumerate(kinds)}
        self.view.set_members(_presence(kind, name) for name, kind in self.workers.items())
        self.reports = 0
        for name in self.workers:
            self.report(name)

    def report(self, name: str, *counted: str) -> None:
        """A load report; what it counts is not under way any more."""
        self.reports += 1
        draw = self.chance.random
        load = WorkerLoad(
            num_running=int(30 * draw()),
            num_waiting=int(5 * draw()),
            num_blocks=100_000,
            num_used_blocks=int(50_000 * draw()),
            block_size=BLOCK_SIZE,
            queued_seconds=3 * draw(),
            prefill_cost=PrefillCost(2e-3, 1e-4 * (1 + draw()), 1e-8),
            fetch_cost=FetchCost(1e-3, 1e9 * (1 + draw()), 5e8),
            mean_output_tokens=200.0,
            recent_request_ids=counted,
        )
        message = LoadReport(kind=self.workers[name], incarnation=name, sequence=self.reports, load=load)
        self.view.hear(message, 0.0)

    def hold(self, prefixes: list[bytes], weights: list[float]) -> None:
        """Popular prefixes in many pools, in part; all of them in the stores, on either tier."""
        for name, kind in self.workers.items():
            if kind is ServiceKind.PREFILL_WORKER:
                for prefix in self.chance.choices(prefixes, cum_weights=weights, k=40):
                    held = prefix[: NAME_BYTES * self.chance.randint(1, NUM_BLOCKS)]
                    self.held.apply(name, Stored(Tier.DEVICE, held))
        for number, prefix in enumerate(prefixes):
            tier = self.chance.choice([Tier.DRAM, Tier.DISK])
            self.held.apply(f"store{number % NUM_STORES}", Stored(tier, prefix))


def _presence(kind: ServiceKind, name: str) -> Presence:
    return Presence(
        kind=kind,
        name=name,
        incarnation=name,
        state=ServiceState.READY,
        model_fingerprint="same",
        max_model_len=1 << 17,
        num_seats=512,
        num_layers=30,
        block_bytes=1 << 19,
    )


def _place(number: int, names: bytes) -> Place:
    num_tokens = len(names) // NAME_BYTES * BLOCK_SIZE + 5
    return Place(
        request_id=f"r{number}",
        num_tokens=num_tokens,
        max_new_tokens=256,
        deadline_unix_seconds=1e9,
        names=names,
    )


def decision_ms(
    cluster: Cluster, policy: str, prefixes: list[bytes], weights: list[float]
) -> tuple[float, float]:
    """Milliseconds that 99 of 100 decisions stay below, by the clock and in processor time: they differ where
    others use the processor. In between, reports come in that count what was placed."""
    matching = Matching(Choosing(POLICIES[policy]), 1 << 20, 512)
    chance, view = cluster.chance, cluster.view
    by_clock: list[float] = []
    by_processor: list[float] = []
    for number in range(NUM_DECISIONS):
        place = _place(number, chance.choices(prefixes, cum_weights=weights)[0])
        draw = Draw(number, chance.random(), chance.random())
        started, started_work = time.perf_counter(), time.thread_time()
        match = matching.match(place, 0.0, view, cluster.held, draw, 0.0)
        if not isinstance(match, Match):
            raise RuntimeError(f"a cluster with room for all has none: {match}")
        view.place(place.request_id, match.shares, 0.0)
        by_processor.append(1e3 * (time.thread_time() - started_work))
        by_clock.append(1e3 * (time.perf_counter() - started))
        for name in match.shares:
            cluster.report(name, place.request_id)
    return _p99(by_clock), _p99(by_processor)


def _p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def memory_mib() -> tuple[float, float]:
    """Resident after some prompts nobody saw before, and after many more of them."""
    cluster = Cluster(4, 4, MAX_KNOWN_BLOCKS, seed=2)
    matching = Matching(Choosing(POLICIES["predicted_ttft"]), 1 << 20, 512)
    settled = 0.0
    for number in range(NUM_SETTLING_PROMPTS + NUM_DISTINCT_PROMPTS):
        place = _place(number, cluster.chance.randbytes(NUM_DISTINCT_BLOCKS * NAME_BYTES))
        match = matching.match(place, 0.0, cluster.view, cluster.held, Draw(number, 0.5, 0.5), 0.0)
        if not isinstance(match, Match):
            raise RuntimeError(f"a cluster with room for all has none: {match}")
        cluster.view.place(place.request_id, match.shares, 0.0)
        for name in match.shares:
            cluster.report(name, place.request_id)
        cluster.held.apply(match.placed.prefill, Stored(Tier.DEVICE, place.names))
        if number == NUM_SETTLING_PROMPTS:
            settled = _resident_mib()
    return settled, _resident_mib()


def _resident_mib() -> float:
    gc.collect()
    return float(psutil.Process().memory_info().rss) / (1 << 20)


def main() -> None:
    """Measure all, print one JSON object."""
    chance = Random(7)
    prefixes = [chance.randbytes(NAME_BYTES * NUM_BLOCKS) for _ in range(NUM_PREFIXES)]
    weights = list(accumulate(1 / rank for rank in range(1, NUM_PREFIXES + 1)))
    cluster = Cluster(NUM_PREFILL, NUM_DECODE, 500_000)
    cluster.hold(prefixes, weights)
    decisions = {}
    for policy in POLICIES:
        by_clock, by_processor = decision_ms(cluster, policy, prefixes, weights)
        decisions[policy] = {"clock": by_clock, "processor": by_processor}
    settled, after = memory_mib()
    print(json.dumps({"decision_ms": decisions, "settled_mib": settled, "after_mib": after}))


if __name__ == "__main__":
    main()
