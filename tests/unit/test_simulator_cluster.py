"""The whole simulated mesh under the live policies."""

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import FetchCost
from libs.cost.plan_fetch import plan_fetch
from libs.cost.prefill import PrefillCost
from libs.routing.policies import POLICIES
from libs.simulator.cluster import Cluster
from libs.simulator.report import Report
from libs.simulator.shape import ClusterShape, DecodeCost, DecodeShape, PrefillShape, StoreShape
from libs.simulator.synthetic import Arrivals, SyntheticLoad, make_load
from libs.simulator.trace import TraceRequest

BLOCK = 64
FAST = FetchCost(latency_seconds=1e-3, bytes_per_second=1e10)
SHAPE = ClusterShape(
    num_prefill=4,
    num_decode=2,
    num_stores=2,
    prefill=PrefillShape(cost=PrefillCost(5e-3, 4e-5, 1.5e-9), num_blocks=1000),
    decode=DecodeShape(cost=DecodeCost(2e-2, 1e-4, 5e-8), num_blocks=100_000),
    store=StoreShape(num_memory_blocks=10_000, fetch=FAST),
    block_size=BLOCK,
    block_bytes=8 << 20,
    num_layers=32,
    max_waiting_tokens=1 << 30,
)
LOAD = SyntheticLoad(num_requests=1500, requests_per_second=100.0, num_prefixes=16, zipf_exponent=1.5)


def changed_store(shape: ClusterShape = SHAPE, **changes) -> ClusterShape:
    store = msgspec.structs.replace(shape.store, **changes)
    return msgspec.structs.replace(shape, store=store)


def replayed(requests, policy: str, shape: ClusterShape = SHAPE, seed: int = 0) -> Report:
    cluster = Cluster(shape, POLICIES[policy], seed=seed)
    cluster.replay(requests)
    return cluster.report(policy)


def warm_load(load: SyntheticLoad) -> list[TraceRequest]:
    """Each prefix comes once, one after the other, before the load begins."""
    requests = make_load(load, block_size=BLOCK, seed=11)
    first = {request.names[0]: request for request in requests}
    warm_up = [
        msgspec.structs.replace(request, arrival_seconds=float(number))
        for number, request in enumerate(first.values())
    ]
    return warm_up + [
        msgspec.structs.replace(request, arrival_seconds=request.arrival_seconds + len(warm_up) + 5)
        for request in requests
    ]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_serves_every_request(policy):
    report = replayed(make_load(LOAD, block_size=BLOCK, seed=1), policy)
    assert (report.num_requests, report.num_refused) == (1500, 0)
    assert 0 < report.ttft_seconds.p50 <= report.ttft_seconds.p99
    assert sum(report.work_shares.values()) == pytest.approx(1.0)


def test_equal_seeds_give_equal_reports_and_others_do_not():
    requests = make_load(LOAD, block_size=BLOCK, seed=1)
    assert replayed(requests, "random", seed=3) == replayed(requests, "random", seed=3)
    assert replayed(requests, "random", seed=3) != replayed(requests, "random", seed=4)


def test_least_load_balances_where_prefix_affinity_overloads_one_instance():
    requests = warm_load(msgspec.structs.replace(LOAD, arrivals=Arrivals.BURSTY))
    affinity, least_load = replayed(requests, "prefix_affinity"), replayed(requests, "least_load")
    assert max(affinity.work_shares.values()) > 0.4
    assert max(least_load.work_shares.values()) < 0.3
    assert least_load.ttft_seconds.p99 < 0.5 * affinity.ttft_seconds.p99


def test_a_store_lets_every_instance_use_what_one_has_computed():
    requests = warm_load(LOAD)
    alone = replayed(requests, "least_load", msgspec.structs.replace(SHAPE, num_stores=0))
    shared = replayed(requests, "least_load")
    assert alone.hit_rates.memory == 0
    assert shared.hit_rates.memory > 0
    assert sum(msgspec.structs.astuple(shared.hit_rates)) > sum(msgspec.structs.astuple(alone.hit_rates))


def with_small_pools(shape: ClusterShape) -> ClusterShape:
    """Each prefill instance has room for two prompts."""
    return msgspec.structs.replace(shape, prefill=msgspec.structs.replace(shape.prefill, num_blocks=80))


def test_with_a_slow_store_predicted_ttft_recomputes():
    requests = warm_load(msgspec.structs.replace(LOAD, requests_per_second=5.0))
    slow_fetch = FetchCost(latency_seconds=1e-3, bytes_per_second=1e7)
    fast = replayed(requests, "predicted_ttft", with_small_pools(SHAPE))
    slow = replayed(requests, "predicted_ttft", with_small_pools(changed_store(fetch=slow_fetch)))
    assert fast.hit_rates.memory > 0.1
    assert slow.hit_rates.memory == 0
    assert slow.ttft_seconds.p50 < 0.2  # a block takes 0.8 s to fetch


def test_one_instance_queues_as_theory_says():
    """Poisson arrivals, equal services, one server: the mean wait is rho / (2 (1 - rho)) services."""
    prompt = msgspec.structs.replace(LOAD, num_requests=20_000, num_prefix_tokens=0, num_own_tokens=1)
    alone = msgspec.structs.replace(
        SHAPE,
        num_prefill=1,
        num_stores=0,
        prefill=PrefillShape(cost=PrefillCost(6e-3, 1e-9, 1e-12), num_blocks=10_000, max_step_tokens=1),
    )
    requests = make_load(prompt, block_size=BLOCK, seed=2)
    report = replayed(requests, "least_load", alone)
    rate = len(requests) / requests[-1].arrival_seconds
    rho = rate * 6e-3
    assert report.ttft_seconds.mean == pytest.approx(6e-3 * (1 + rho / (2 * (1 - rho))), rel=0.05)


def test_predicted_ttft_is_at_least_as_good_as_a_blind_choice():
    requests = make_load(LOAD, block_size=BLOCK, seed=5)
    predicted, blind = replayed(requests, "predicted_ttft"), replayed(requests, "random")
    assert predicted.ttft_seconds.mean <= blind.ttft_seconds.mean


def test_a_disk_serves_what_memory_has_no_room_for():
    requests = warm_load(LOAD)
    without = with_small_pools(changed_store(num_memory_blocks=100))
    with_disk = with_small_pools(changed_store(num_memory_blocks=100, num_disk_blocks=10_000))
    assert replayed(requests, "least_load", without).hit_rates.disk == 0
    assert replayed(requests, "least_load", with_disk).hit_rates.disk > 0.1


def test_the_first_token_after_a_fetch_comes_when_the_plan_says():
    one_store = msgspec.structs.replace(SHAPE, num_stores=1)
    names = [bytes([block]).ljust(16, b"n") for block in range(40)]
    requests = [TraceRequest(at, 40 * BLOCK, 1, names) for at in (0.0, 10.0)]
    cluster = Cluster(one_store, POLICIES["round_robin"])
    cluster.replay(requests)
    first, second = cluster.finished
    assert (first.prefill, second.prefill) == ("prefill-0", "prefill-1")
    plan = plan_fetch(
        num_tokens=40 * BLOCK,
        num_here_blocks=0,
        num_held_blocks=40,
        block_size=BLOCK,
        block_bytes=SHAPE.block_bytes,
        num_layers=SHAPE.num_layers,
        prefill=SHAPE.prefill.cost,
        fetch=SHAPE.store.fetch,
    )
    assert second.num_memory_blocks == plan.num_blocks > 0
    assert second.ttft_seconds == pytest.approx(plan.seconds)


def test_a_short_ttl_costs_hits():
    requests = warm_load(LOAD)
    endless = replayed(requests, "least_load", with_small_pools(SHAPE))
    short = replayed(requests, "least_load", with_small_pools(changed_store(ttl_seconds=0.1)))
    assert short.hit_rates.memory < 0.8 * endless.hit_rates.memory


def test_a_request_too_long_for_any_instance_is_refused_and_holds_nobody_up():
    names = [bytes([1]) * 16] * 3000
    requests = [TraceRequest(0.0, 3000 * BLOCK, 1, names), TraceRequest(0.1, 100, 5, [])]
    report = replayed(requests, "least_load")
    assert (report.num_requests, report.num_refused) == (2, 1)
    assert report.makespan_seconds < 2


def test_a_router_holds_requests_back_while_all_prefill_queues_are_full():
    requests = [TraceRequest(0.0, 2000, 1, []) for _ in range(40)]
    bounded = msgspec.structs.replace(SHAPE, max_waiting_tokens=2000)
    cluster = Cluster(bounded, POLICIES["round_robin"])
    cluster.replay(requests)
    waited = [job.placed_at - job.request.arrival_seconds for job in cluster.finished]
    assert len(waited) == 40
    assert sum(seconds > 0 for seconds in waited) == 36


def assert_nothing_is_left(cluster: Cluster) -> None:
    for prefill in cluster.prefills:
        assert prefill.num_jobs == prefill.num_waiting_tokens == 0
        assert prefill.allocator.num_used == 0
    for decode in cluster.decodes:
        assert decode.num_placed == decode.num_reserved_blocks == decode.num_running == 0
    for store in cluster.fetching.stores.values():
        assert len(store.link) == len(store.disk) == 0
        assert not store.tree.num_readers.any()


REQUESTS = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 4), st.integers(1, 40 * BLOCK), st.integers(1, 30)),
    min_size=1,
    max_size=40,
)


@given(REQUESTS, st.sampled_from(list(POLICIES)), st.integers(0, 3), st.integers(0, 60), st.integers(1, 4000))
def test_every_request_ends_once_and_leaves_nothing_behind(rows, policy, num_stores, num_disk, max_waiting):
    """With pools, memory, disk and queues far too small for the load."""
    requests = [
        TraceRequest(
            at, size, output, [bytes([prefix, block]).ljust(16, b"x") for block in range(size // BLOCK)]
        )
        for at, prefix, size, output in sorted(rows)
    ]
    shape = msgspec.structs.replace(
        changed_store(num_memory_blocks=20, num_disk_blocks=num_disk),
        num_stores=num_stores,
        max_waiting_tokens=max_waiting,
        prefill=msgspec.structs.replace(SHAPE.prefill, num_blocks=50, max_step_tokens=300),
        decode=msgspec.structs.replace(SHAPE.decode, num_blocks=45),
    )
    cluster = Cluster(shape, POLICIES[policy], seed=1)
    cluster.replay(requests)
    assert sorted(job.number for job in cluster.finished) == list(range(len(requests)))
    for job in cluster.finished:
        assert job.request.arrival_seconds <= job.placed_at < job.prefilled_at <= job.finished_at
        used = job.num_here_blocks + job.num_memory_blocks + job.num_disk_blocks
        assert used * BLOCK < job.request.num_input_tokens
    assert_nothing_is_left(cluster)


def test_fifty_thousand_requests_take_less_than_a_minute_of_one_core():
    requests = make_load(msgspec.structs.replace(LOAD, num_requests=2500), block_size=BLOCK, seed=1)
    began = time.process_time()
    replayed(requests, "predicted_ttft")
    assert time.process_time() - began < 3.0
