"""Figures that others found in Mooncake's public conversation trace, found again.

MOONCAKE_TRACE names the file, `conversation_trace.jsonl` of the FAST'25 release; without it this is skipped.
"""

import os
from pathlib import Path

import pytest
from trace_hit_rate import hit_rate

from libs.cost.fetch import FetchCost
from libs.cost.prefill import PrefillCost
from libs.routing.policies import POLICIES
from libs.simulator.cluster import Cluster
from libs.simulator.shape import ClusterShape, DecodeCost, DecodeShape, PrefillShape, StoreShape
from libs.simulator.trace import TraceRequest, read_trace


@pytest.fixture(scope="module")
def conversations() -> list[TraceRequest]:
    if not (path := os.environ.get("MOONCAKE_TRACE", "")):
        pytest.skip("MOONCAKE_TRACE names no trace")
    return read_trace([Path(path)])


@pytest.mark.parametrize(
    ("num_blocks", "percent"), [(1000, 4.4), (5000, 11.0), (10_000, 21.1), (30_000, 32.6), (50_000, 35.5)]
)
def test_lru_finds_as_much_as_others_found(conversations, num_blocks, percent):
    assert 100 * hit_rate(conversations, num_blocks) == pytest.approx(percent, abs=0.5)


def test_with_room_for_everything_the_ideal_is_found(conversations):
    assert 100 * hit_rate(conversations, 200_000) == pytest.approx(36.6, abs=0.1)


def mean_ttft(requests: list[TraceRequest], policy: str, num_stores: int) -> float:
    """Of a large model on a few fast devices, loaded well."""
    shape = ClusterShape(
        num_prefill=7,
        num_decode=8,
        num_stores=num_stores,
        prefill=PrefillShape(cost=PrefillCost(5e-3, 1e-4, 4e-9), num_blocks=3000),
        decode=DecodeShape(cost=DecodeCost(2e-2, 1e-4, 5e-8), num_blocks=4000),
        store=StoreShape(num_memory_blocks=50_000, fetch=FetchCost(2e-3, 1e10)),
        block_size=512,
        block_bytes=64 << 20,
        num_layers=32,
        max_waiting_tokens=1 << 30,
    )
    cluster = Cluster(shape, POLICIES[policy], seed=1)
    cluster.replay(requests)
    return cluster.report(policy).ttft_seconds.mean


def test_chance_loses_to_load_load_to_local_caches_and_these_to_a_global_one(conversations):
    """As Mooncake reports it of its scheduler: 19.65, 5.27, 3.58 and 3.07 s."""
    requests = conversations[:2500]
    chance, load = mean_ttft(requests, "random", 0), mean_ttft(requests, "least_load", 0)
    local, shared = mean_ttft(requests, "predicted_ttft", 0), mean_ttft(requests, "predicted_ttft", 1)
    assert chance > 2 * load
    assert load > 1.2 * local
    assert local > 1.1 * shared
