from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.kv.names import block_names
from libs.kv.runs import RUN_BLOCKS, joined_runs, owner_of, runs_by_store, runs_of

NAMES = block_names(list(range(4000)), 1, "model", "")


@given(st.integers(-3, 500))
def test_runs_cover_a_chain_in_order_and_only_the_last_is_short(num_blocks: int) -> None:
    runs = runs_of(num_blocks)
    assert [n for run in runs for n in run] == list(range(num_blocks))
    assert all(run.start % RUN_BLOCKS == 0 for run in runs)
    assert all(len(run) == RUN_BLOCKS for run in runs[:-1])


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_longer_chain_keeps_the_runs_of_a_shorter_one_where_they_are(shorter: int, longer: int) -> None:
    shorter, longer = sorted((shorter, longer))
    stores = ["a", "b", "c"]
    for store, runs in runs_by_store(NAMES[:shorter], stores).items():
        starts = {run.start for run in runs_by_store(NAMES[:longer], stores)[store]}
        assert {run.start for run in runs} <= starts


@given(st.lists(st.text(max_size=5), min_size=2, max_size=6, unique=True), st.integers(0, 3999), st.data())
def test_only_the_runs_of_a_store_that_goes_move(stores: list[str], block: int, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(stores))
    before = owner_of(NAMES[block], stores)
    after = owner_of(NAMES[block], [store for store in reversed(stores) if store != gone])
    assert after != gone
    assert before in (gone, after)


def test_stores_get_about_the_same_number_of_runs() -> None:
    counts = Counter(owner_of(name, ["store-0", "store-1", "store-2"]) for name in NAMES)
    assert min(counts.values()) > 0.9 * len(NAMES) / 3


def test_without_stores_no_run_lies_anywhere() -> None:
    assert runs_by_store(NAMES[:70], []) == {}
    with pytest.raises(ValueError, match="somebody"):
        owner_of(NAMES[0], [])


@given(st.lists(st.booleans(), max_size=20))
def test_runs_side_by_side_are_joined_and_others_are_not(is_taken: list[bool]) -> None:
    runs = [run for run, taken in zip(runs_of(len(is_taken) * RUN_BLOCKS), is_taken, strict=True) if taken]
    joined = joined_runs(runs)
    assert [n for run in joined for n in run] == [n for run in runs for n in run]
    assert all(one.stop < other.start for one, other in pairwise(joined))
