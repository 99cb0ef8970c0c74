"""What the router predicts of a worker, against what that worker plans: two codes, one model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import FetchCost
from libs.cost.plan_fetch import FetchReason, plan_fetch
from libs.cost.prefill import PrefillCost
from libs.routing.candidates import PrefillCandidates, Prompt
from libs.routing.predicting import predict

BLOCK = 16
RATES = st.floats(-9, -2).map(lambda exponent: 10**exponent)


def candidate(queued: float, num_local: int, prefill: PrefillCost, fetch: FetchCost) -> PrefillCandidates:
    def one(value: float) -> np.ndarray:
        return np.array([float(value)])

    return PrefillCandidates(
        queued_seconds=one(queued),
        num_prompts=np.array([0]),
        num_local_blocks=np.array([num_local]),
        step_seconds=one(prefill.step_seconds),
        token_seconds=one(prefill.token_seconds),
        pair_seconds=one(prefill.pair_seconds),
        fetch_latency_seconds=one(fetch.latency_seconds),
        fetch_bytes_per_second=one(fetch.bytes_per_second),
        disk_bytes_per_second=one(fetch.disk_bytes_per_second),
    )


@given(
    num_tokens=st.integers(1, 5000),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    prefill=st.builds(PrefillCost, RATES, RATES, RATES.map(lambda rate: rate * 1e-3)),
    fetch=st.builds(FetchCost, RATES, st.floats(1e5, 1e11), st.sampled_from([0.0, 1e6, 1e9])),
    queued=st.sampled_from([0.0, 0.01, 1.0]),
    num_layers=st.sampled_from([1, 30]),
)
def test_a_router_predicts_what_the_worker_plans(num_tokens, shares, prefill, fetch, queued, num_layers):
    """It looks at fewer parts of a prefix, so it may miss the best one, and is exact for all and nothing."""
    num_blocks = num_tokens // BLOCK
    num_held = round(shares[0] * num_blocks)
    num_local, num_memory = round(shares[1] * num_held), round(shares[2] * num_held)
    prompt = Prompt(
        num_tokens=num_tokens,
        block_size=BLOCK,
        block_bytes=1 << 18,
        num_layers=num_layers,
        store_end=np.full(num_held + 1, num_held),
        disk_before=np.maximum(np.arange(num_held + 1) - max(num_memory, num_local), 0),
    )
    predicted = predict(prompt, candidate(queued, num_local, prefill, fetch)).ttft_seconds[0]
    plan = plan_fetch(
        num_tokens=num_tokens,
        num_here_blocks=num_local,
        num_held_blocks=num_held,
        num_memory_blocks=num_memory,
        block_size=BLOCK,
        block_bytes=1 << 18,
        num_layers=num_layers,
        prefill=prefill,
        fetch=fetch,
        queued_seconds=queued,
    )
    assert predicted >= plan.seconds * (1 - 1e-9)
    if plan.reason is not FetchReason.FETCH_PART:
        assert predicted == pytest.approx(plan.seconds)
