"""How much of a held prefix is fetched, and how much recomputed."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import FetchCost
from libs.cost.plan_fetch import FetchPlan, FetchReason, plan_fetch
from libs.cost.prefill import PrefillCost, prefill_seconds
from tests.bench.overlap_formula import overlapped_seconds

PREFILL = PrefillCost(step_seconds=5e-3, token_seconds=1e-4, pair_seconds=1e-8)
FAST = FetchCost(latency_seconds=1e-3, bytes_per_second=1e10)


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_here: int
    num_held: int
    num_memory: int
    block_size: int
    block_bytes: int
    num_layers: int
    max_step_tokens: int
    num_sharing: int
    prefill: PrefillCost
    fetch: FetchCost
    queued_seconds: float = 0.0

    def plan(self) -> FetchPlan:
        return plan_fetch(
            num_tokens=self.num_tokens,
            num_here_blocks=self.num_here,
            num_held_blocks=self.num_held,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            num_layers=self.num_layers,
            prefill=self.prefill,
            fetch=self.fetch,
            num_sharing=self.num_sharing,
            num_memory_blocks=self.num_memory,
            max_step_tokens=self.max_step_tokens,
            queued_seconds=self.queued_seconds,
        )

    @property
    def num_usable(self) -> int:
        return max(0, min(self.num_held, (self.num_tokens - 1) // self.block_size) - self.num_here)

    def seconds(self, num_blocks: int) -> float:
        """The time of fetching exactly so many blocks, straight from the formulas."""
        context = (self.num_here + num_blocks) * self.block_size
        first = min(self.num_tokens - context, self.max_step_tokens)
        step = prefill_seconds(self.prefill, first, context, max_step_tokens=self.max_step_tokens)
        whole = prefill_seconds(
            self.prefill, self.num_tokens - context, context, max_step_tokens=self.max_step_tokens
        )
        computed = self.queued_seconds + whole
        if num_blocks == 0:
            return computed
        num_from_disk = len(range(max(self.num_here, self.num_memory), self.num_here + num_blocks))
        link = num_blocks * self.block_bytes / self.fetch.bytes_per_second
        disk_rate = self.fetch.disk_bytes_per_second
        disk = num_from_disk * self.block_bytes / disk_rate if disk_rate else 0.0
        fetching = self.num_sharing * max(link, disk) / self.num_layers
        overlapped = overlapped_seconds(fetching, step / self.num_layers, self.num_layers)
        return max(computed, self.fetch.latency_seconds + overlapped + whole - step)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 16, 64]))
    num_tokens = draw(st.integers(1, 300 * block_size))
    num_full = num_tokens // block_size
    num_here = draw(st.integers(0, max(0, (num_tokens - 1) // block_size)))
    num_held = draw(st.integers(0, num_full))
    exponent = st.floats(-9, -1).map(lambda e: 10**e)
    rate = st.floats(3, 11).map(lambda e: 10**e)
    return Case(
        num_tokens,
        num_here,
        num_held,
        draw(st.integers(0, num_held)),
        block_size,
        draw(st.integers(1, 1 << 22)),
        draw(st.sampled_from([1, 2, 30, 80])),
        draw(st.sampled_from([1, 50, 512, 2048, 100_000])),
        draw(st.integers(1, 5)),
        PrefillCost(draw(exponent), draw(exponent), draw(exponent) * 1e-3),
        FetchCost(draw(exponent), draw(rate), draw(st.one_of(st.just(0.0), rate))),
        draw(st.one_of(st.just(0.0), exponent)),
    )


@given(cases())
def test_no_other_number_of_blocks_is_faster(case):
    plan = case.plan()
    best = min(case.seconds(k) for k in range(case.num_usable + 1))
    assert 0 <= plan.num_blocks <= case.num_usable
    assert plan.seconds == pytest.approx(case.seconds(plan.num_blocks))
    assert plan.seconds == pytest.approx(best)


@given(cases())
def test_a_plan_is_never_worse_than_fetching_nothing_or_everything(case):
    plan = case.plan()
    assert plan.seconds <= case.seconds(0) * (1 + 1e-9)
    assert plan.seconds <= case.seconds(case.num_usable) * (1 + 1e-9)


@given(cases(), st.integers(0, 20))
def test_a_longer_held_prefix_never_makes_it_slower(case, more):
    longer = Case(**{**vars(case), "num_held": case.num_held + more, "num_memory": case.num_memory + more})
    assert longer.plan().seconds <= case.plan().seconds * (1 + 1e-9)


@given(cases())
def test_more_fetches_at_once_never_make_it_faster(case):
    busier = Case(**{**vars(case), "num_sharing": case.num_sharing + 1})
    assert busier.plan().seconds >= case.plan().seconds * (1 - 1e-9)


@given(cases())
def test_the_reason_says_how_much_is_fetched(case):
    plan = case.plan()
    expected = {
        FetchReason.NOTHING_HELD: plan.num_blocks == case.num_usable == 0,
        FetchReason.RECOMPUTE: plan.num_blocks == 0 < case.num_usable,
        FetchReason.FETCH_PART: 0 < plan.num_blocks < case.num_usable,
        FetchReason.FETCH_ALL: plan.num_blocks == case.num_usable > 0,
    }
    assert [reason for reason, holds in expected.items() if holds] == [plan.reason]


def test_a_fast_link_fetches_all_but_the_last_token():
    plan = Case(1024, 0, 64, 64, 16, 1 << 20, 30, 2048, 1, PREFILL, FAST).plan()
    assert (plan.num_blocks, plan.reason) == (63, FetchReason.FETCH_ALL)


def test_a_link_slower_than_computing_fetches_nothing():
    slow = FetchCost(latency_seconds=1e-3, bytes_per_second=1e6)
    plan = Case(1024, 0, 64, 64, 16, 1 << 20, 30, 2048, 1, PREFILL, slow).plan()
    assert (plan.num_blocks, plan.reason) == (0, FetchReason.RECOMPUTE)


def test_a_link_about_as_fast_as_computing_fetches_a_part_and_hides_it():
    """Both sides work at the same time, so each takes about half of the prompt."""
    even = FetchCost(latency_seconds=0.0, bytes_per_second=(1 << 20) / 16 / 1e-4)
    prefill = PrefillCost(step_seconds=0.0, token_seconds=1e-4, pair_seconds=0.0)
    plan = Case(1600, 0, 100, 100, 16, 1 << 20, 100, 2048, 1, prefill, even).plan()
    assert plan.reason is FetchReason.FETCH_PART
    assert 45 <= plan.num_blocks <= 55
    assert plan.seconds == pytest.approx(0.08, rel=0.05)


def test_blocks_on_a_slow_disk_are_recomputed_and_those_in_memory_fetched():
    fetch = FetchCost(latency_seconds=1e-4, bytes_per_second=1e10, disk_bytes_per_second=1e6)
    plan = Case(1600, 0, 90, 40, 16, 1 << 20, 30, 2048, 1, PREFILL, fetch).plan()
    assert plan.num_blocks == 40


def test_a_slow_fetch_is_worth_it_while_the_prompt_would_queue_anyway():
    slow = FetchCost(latency_seconds=1e-3, bytes_per_second=1e8)
    now = Case(1024, 0, 64, 64, 16, 1 << 20, 30, 2048, 1, PREFILL, slow)
    later = Case(**{**vars(now), "queued_seconds": 2.0})
    assert now.plan().reason is not FetchReason.FETCH_ALL
    assert later.plan().reason is FetchReason.FETCH_ALL


def test_blocks_that_are_here_are_not_fetched_again():
    plan = Case(1600, 60, 60, 60, 16, 1 << 20, 30, 2048, 1, PREFILL, FAST).plan()
    assert (plan.num_blocks, plan.reason) == (0, FetchReason.NOTHING_HELD)


def test_a_prompt_that_is_here_as_a_whole_still_computes_its_last_token():
    plan = Case(64, 4, 4, 4, 16, 1 << 20, 30, 2048, 1, PREFILL, FAST).plan()
    assert plan.num_blocks == 0
    assert plan.seconds == pytest.approx(prefill_seconds(PREFILL, 16, 48))


@pytest.mark.parametrize(
    "change", [{"num_tokens": 0}, {"num_here": -1}, {"num_held": -1}, {"block_size": 0}, {"num_sharing": 0}]
)
def test_what_is_no_prompt_is_refused(change):
    case = Case(100, 0, 4, 4, 16, 1 << 20, 30, 2048, 1, PREFILL, FAST)
    with pytest.raises(ValueError, match="not a prompt"):
        Case(**{**vars(case), **change}).plan()
