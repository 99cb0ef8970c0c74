"""One prefill and one decode instance of the simulated mesh."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.cost.fetch import FetchCost
from libs.cost.prefill import PrefillCost, prefill_seconds
from libs.simulator.decode_instance import DecodeInstance
from libs.simulator.event_loop import Due, run_events
from libs.simulator.job import Job
from libs.simulator.prefill_instance import PrefillInstance
from libs.simulator.shape import ClusterShape, DecodeCost, DecodeShape, PrefillShape, StoreShape
from libs.simulator.trace import TraceRequest
from tests.bench.overlap_formula import overlapped_seconds

COST = PrefillCost(step_seconds=0.01, token_seconds=1e-3, pair_seconds=1e-6)
BLOCK = 16


def shape_of(num_blocks: int = 1000, max_step_tokens: int = 128) -> ClusterShape:
    return ClusterShape(
        num_prefill=1,
        num_decode=1,
        num_stores=0,
        prefill=PrefillShape(cost=COST, num_blocks=num_blocks, max_step_tokens=max_step_tokens),
        decode=DecodeShape(cost=DecodeCost(0.02, 1e-3, 1e-6), num_blocks=1000),
        store=StoreShape(num_memory_blocks=1, fetch=FetchCost(0.0, 1e9)),
        block_size=BLOCK,
        block_bytes=1,
        num_layers=10,
    )


def job_of(number: int, num_tokens: int, prefix: str = "", num_output: int = 1) -> Job:
    """Its blocks are its own, or those of all prompts with the same prefix."""
    owner = prefix or f"job{number}-"
    names = [f"{owner}{at}".encode().ljust(16, b".") for at in range(num_tokens // BLOCK)]
    return Job(number, TraceRequest(0.0, num_tokens, num_output, names), names)


class Bench:
    """One prefill instance, and when its prompts were through."""

    def __init__(self, shape: ClusterShape, fetch_seconds: float = 0.0, num_fetched: int = 0) -> None:
        self._fetch = (fetch_seconds, num_fetched)
        self.through: list[tuple[int, float]] = []
        self.num_steps = 0
        self.instance = PrefillInstance("prefill-0", shape, self._begin_fetch, self._note, self._stepped)

    def run(self, *arrivals: tuple[float, Job]) -> list[tuple[int, float]]:
        run_events([Due(at, lambda now, job=job: self.instance.enqueue(job, now)) for at, job in arrivals])
        return self.through

    def _begin_fetch(self, job: Job, now: float) -> list[Due]:
        seconds, num_blocks = self._fetch
        if not num_blocks or job.number:
            return []
        job.num_fetches, job.fetch_began = 1, now
        self.instance.begin_computing_less(job, num_blocks * BLOCK)

        def ended(then: float) -> list[Due]:
            job.num_fetches, job.fetch_ended = 0, then
            return self.instance.fetch_ended(job, then)

        return [Due(now + seconds, ended)]

    def _note(self, job: Job, now: float) -> list[Due]:
        self.through.append((job.number, now))
        return []

    def _stepped(self, now: float) -> list[Due]:
        self.num_steps += 1
        return []


@given(st.integers(1, 2000), st.integers(1, 600))
def test_a_prompt_alone_takes_as_long_as_the_cost_model_says(num_tokens, max_step_tokens):
    bench = Bench(shape_of(max_step_tokens=max_step_tokens))
    ((_, ended),) = bench.run((0.0, job_of(0, num_tokens)))
    assert ended == pytest.approx(prefill_seconds(COST, num_tokens, 0, max_step_tokens=max_step_tokens))
    assert bench.instance.busy_seconds == pytest.approx(ended)


def test_small_prompts_share_a_step():
    through = Bench(shape_of(max_step_tokens=128)).run(
        (0.0, job_of(0, 100)), (0.01, job_of(1, 40)), (0.02, job_of(2, 40))
    )
    assert through[1][1] == through[2][1]


def test_prompts_are_through_in_the_order_they_came():
    bench = Bench(shape_of())
    through = bench.run(*((0.001 * number, job_of(number, 300)) for number in range(5)))
    assert [number for number, _ in through] == [0, 1, 2, 3, 4]


def test_what_an_earlier_prompt_left_in_the_pool_is_not_computed_again():
    bench = Bench(shape_of())
    bench.run((0.0, job_of(0, 160, "shared")), (10.0, later := job_of(1, 320, "shared")))
    assert later.num_here_blocks == 10
    took = bench.through[1][1] - 10.0
    assert took == pytest.approx(prefill_seconds(COST, 160, 160, max_step_tokens=128))


def test_the_last_token_is_computed_even_where_all_blocks_are_here():
    bench = Bench(shape_of())
    bench.run((0.0, job_of(0, 160, "shared")), (10.0, later := job_of(1, 160, "shared")))
    assert later.num_here_blocks == 9


def test_a_prompt_waits_for_blocks_that_others_hold():
    bench = Bench(shape_of(num_blocks=10))
    through = bench.run((0.0, job_of(0, 160)), (0.01, job_of(1, 160)))
    first, second = (ended for _, ended in through)
    assert second == pytest.approx(2 * first)


@pytest.mark.parametrize("fetch_seconds", [0.01, 0.1, 1.0])
def test_a_fetch_overlaps_with_the_only_prompt_layer_by_layer(fetch_seconds):
    bench = Bench(shape_of(), fetch_seconds, num_fetched=20)
    ((_, ended),) = bench.run((0.0, job_of(0, 20 * BLOCK + 100)))
    computing = prefill_seconds(COST, 100, 20 * BLOCK, max_step_tokens=128)
    assert ended == pytest.approx(overlapped_seconds(fetch_seconds / 10, computing / 10, 10))


def test_what_is_ready_does_not_wait_for_what_is_being_fetched():
    bench = Bench(shape_of(), fetch_seconds=5.0, num_fetched=4)
    through = bench.run((0.0, job_of(0, 100)), (0.01, job_of(1, 100)))
    assert [number for number, _ in through] == [1, 0]
    assert through[0][1] < 1.0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 700)), min_size=1, max_size=12))
def test_an_instance_is_empty_in_the_end_and_its_seconds_add_up(arrivals):
    bench = Bench(shape_of(num_blocks=60), fetch_seconds=0.3, num_fetched=0)
    through = bench.run(*((at, job_of(number, size)) for number, (at, size) in enumerate(arrivals)))
    instance = bench.instance
    assert len(through) == len(arrivals)
    assert (instance.num_jobs, instance.num_waiting_tokens) == (0, 0)
    assert instance.queued_seconds(1e9) == pytest.approx(0.0, abs=1e-9)
    assert instance.allocator.num_free == 60
    assert instance.busy_seconds <= max(ended for _, ended in through) + 1e-9


def test_queued_seconds_are_what_a_newcomer_would_wait():
    bench = Bench(shape_of(max_step_tokens=100))
    bench.instance.enqueue(job_of(0, 100), 0.0)
    alone = prefill_seconds(COST, 100, 0)
    assert bench.instance.queued_seconds(0.0) == pytest.approx(alone)
    assert bench.instance.queued_seconds(0.05) == pytest.approx(alone - 0.05)


def decode_bench(*arrivals: tuple[float, Job]) -> dict[int, float]:
    finished: dict[int, float] = {}

    def note(job: Job, now: float) -> list[Due]:
        finished[job.number] = now
        return []

    decode = DecodeInstance("decode-0", shape_of().decode, BLOCK, note)

    def begins(job: Job):
        def begin(now: float) -> list[Due]:
            decode.reserve(job)
            return decode.begin(job, now)

        return begin

    run_events([Due(at, begins(job)) for at, job in arrivals])
    assert (decode.num_reserved_blocks, decode.num_placed, decode.num_running) == (0, 0, 0)
    return finished


def test_a_sequence_alone_takes_one_step_for_each_token_after_its_first():
    finished = decode_bench((0.0, job_of(0, 1000, num_output=11)))
    assert finished[0] == pytest.approx(10 * (0.02 + 1e-3 + 1000 * 1e-6))


def test_a_sequence_of_one_token_is_through_at_once():
    assert decode_bench((1.0, job_of(0, 50, num_output=1))) == {0: 1.0}


def test_sequences_slow_each_other_down_as_long_as_both_are_there():
    finished = decode_bench((0.0, job_of(0, 0, num_output=11)), (0.0, job_of(1, 0, num_output=21)))
    both, alone = 0.02 + 2e-3, 0.02 + 1e-3
    assert finished[0] == pytest.approx(10 * both)
    assert finished[1] == pytest.approx(10 * both + 10 * alone, rel=1e-3)


def test_room_is_kept_for_the_whole_answer():
    decode = DecodeInstance("decode-0", shape_of().decode, BLOCK, lambda job, now: [])
    job = job_of(0, 100, num_output=60)
    decode.reserve(job)
    assert decode.num_reserved_blocks == 10
    assert not decode.can_reserve(job_of(1, 991 * BLOCK))
    assert decode.can_reserve(job_of(1, 989 * BLOCK))
