"""Decode placement by predicted KV use, and the homes of sessions."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.routing.candidates import DecodeCandidates, Draw
from libs.routing.decode_placement import (
    NEAR_SHARE,
    blocks_for,
    expected_growth_blocks,
    expected_output_tokens,
    least_kv,
    session_worker,
)

UNIT = st.floats(0, 1, exclude_max=True)
POOLS = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 50)), min_size=1, max_size=9
)


@given(st.integers(0, 300), st.integers(1, 64))
def test_blocks_for_tokens_hold_them_and_one_more_and_none_too_many(num_tokens: int, block_size: int) -> None:
    [blocks] = blocks_for(num_tokens, np.array([block_size]))
    assert (blocks - 1) * block_size <= num_tokens < blocks * block_size


@given(st.floats(0, 10**6), st.integers(0, 10**6))
def test_an_answer_is_expected_to_be_within_the_mean_and_its_bound(mean: float, at_most: int) -> None:
    [expected] = expected_output_tokens(np.array([mean]), at_most)
    assert min(mean, at_most) - 1 < expected <= min(mean, at_most)


@given(POOLS, st.integers(1, 50), UNIT)
def test_the_pool_that_will_be_the_least_full_is_taken(
    pools: list[tuple[int, int, int]], needed: int, chance: float
) -> None:
    num_blocks = np.array([blocks for blocks, _, _ in pools])
    free = np.array([min(blocks, free) for blocks, free, _ in pools])
    state = DecodeCandidates(num_blocks, free, np.array([sequences for _, _, sequences in pools]))
    share = (num_blocks - free + needed) / num_blocks
    chosen = least_kv(np.full(len(pools), needed), state, Draw(0, chance, 0.0))
    assert share[chosen] <= share.min() + NEAR_SHARE


def test_of_pools_alike_the_one_with_fewest_sequences_is_taken() -> None:
    state = DecodeCandidates(np.array([100] * 3), np.array([50] * 3), np.array([3, 2, 3]))
    assert least_kv(np.array([4] * 3), state, Draw(0, 0.9, 0.0)) == 1


def test_running_sequences_grow_by_half_an_answer_and_new_ones_by_a_whole_one() -> None:
    growth = expected_growth_blocks(
        np.array([2, 2]), np.array([1, 1]), np.array([0, 160]), np.array([16, 16])
    )
    assert growth.tolist() == [3, 2 * 5 + 10]


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=12, unique=True))
def test_a_session_keeps_its_home_when_another_worker_goes(session: str, workers: list[str]) -> None:
    home = workers[session_worker(session, workers)]
    for gone in set(workers) - {home}:
        rest = [worker for worker in workers if worker != gone]
        assert rest[session_worker(session, rest)] == home
    assert workers[::-1][session_worker(session, workers[::-1])] == home


def test_sessions_are_spread_over_all_workers() -> None:
    homes = Counter(session_worker(f"session {n}", ["a", "b", "c", "d"]) for n in range(400))
    assert min(homes.values()) > 60


def test_no_worker_is_no_home() -> None:
    with pytest.raises(ValueError, match="needs somebody"):
        session_worker("s", [])
