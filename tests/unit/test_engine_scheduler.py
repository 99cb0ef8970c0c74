from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from libs.engine.scheduling.scheduler import Limits, Schedule, blocks_for, is_decode, loading_chunk, schedule

SIZE = 4


@dataclass(eq=False)
class Job:
    """A sequence as the scheduler sees it, with the life it will have."""

    arrival: int
    num_tokens: int
    num_new_tokens: int = 1
    num_computed: int = 0
    num_blocks: int = 0
    hand_over: bool = False
    num_handed_blocks: int = 0
    num_preempted: int = 0
    is_loading: bool = False


def limits(*, seqs: int = 8, tokens: int = 16, free: int = 100, hand_over: int = 100) -> Limits:
    return Limits(SIZE, seqs, tokens, free, hand_over)


def plan(jobs: list[Job], given_limits: Limits) -> Schedule[Job]:
    return schedule(jobs, given_limits, lambda job: job.num_blocks)


def decoding(arrival: int, num_tokens: int) -> Job:
    return Job(arrival, num_tokens, 99, num_tokens - 1, blocks_for(num_tokens - 1, SIZE))


def prompt(arrival: int, num_tokens: int, num_computed: int = 0, **more: object) -> Job:
    job = Job(arrival, num_tokens, 1, num_computed, blocks_for(num_tokens + 1, SIZE))
    return replace(job, **more)  # type: ignore[arg-type]  # keyword arguments of any field


def test_decodes_come_first_and_prompts_share_the_rest_oldest_first() -> None:
    old, new, running = prompt(0, 14), prompt(1, 30), decoding(2, 3)
    told = plan([old, new, running], limits(tokens=20))
    assert told.decodes == [running]
    assert [(chunk.sequence, chunk.num_tokens) for chunk in told.chunks] == [(old, 14), (new, 5)]


def test_a_long_prompt_runs_in_chunks() -> None:
    job = prompt(0, 40, num_computed=16)
    assert plan([job], limits(tokens=16)).chunks[0].num_tokens == 16
    job.num_computed = 32
    assert plan([job], limits(tokens=16)).chunks[0].num_tokens == 8


def test_a_prompt_advances_beside_a_full_house_of_decodes() -> None:
    jobs = [prompt(0, 30), *(decoding(age, 3) for age in range(1, 9))]
    told = plan(jobs, limits(seqs=4, tokens=4))
    assert len(told.decodes) == 3
    assert told.chunks[0].num_tokens == 1


def test_a_decode_takes_a_block_only_at_a_border() -> None:
    at_border, inside = decoding(0, 5), decoding(1, 4)
    told = plan([at_border, inside], limits(free=1))
    assert told.decodes == [at_border, inside]
    assert told.grown == [at_border]


def test_out_of_blocks_the_youngest_gives_way() -> None:
    jobs = [decoding(age, 5) for age in range(4)]
    told = plan(jobs, limits(free=1))
    assert told.preempted == [jobs[3]]
    assert told.decodes == jobs[:2]
    assert told.is_short_of_blocks, "the third found neither a block nor anyone younger"


def test_nobody_is_preempted_for_a_younger_one() -> None:
    inside, at_border = decoding(0, 4), decoding(1, 5)
    told = plan([inside, at_border], limits(free=0))
    assert told.decodes == [inside]
    assert not told.preempted
    assert told.is_short_of_blocks


def test_a_chunk_shrinks_to_the_free_blocks_before_anyone_is_preempted() -> None:
    growing = Job(0, 40, num_blocks=1)
    told = plan([growing, decoding(1, 4)], limits(free=2, tokens=41))
    assert told.chunks[0].num_tokens == 12
    assert told.chunks[0].num_new_blocks == 2
    assert not told.preempted


def test_a_preempted_sequence_comes_back_whole_or_not_at_all() -> None:
    back = Job(0, 20, num_preempted=1)
    assert plan([back], limits(free=5)).is_empty
    assert plan([back], limits(free=5)).is_short_of_blocks
    chunk = plan([back], limits(free=6)).chunks[0]
    assert (chunk.num_tokens, chunk.num_new_blocks) == (16, 6)


def test_none_comes_back_before_an_older_one_does() -> None:
    large, small = Job(0, 20), Job(1, 2)
    told = plan([large, small], limits(free=3))
    assert told.is_empty


def test_shared_blocks_do_not_count_as_freed() -> None:
    old, young = decoding(0, 5), decoding(1, 4)
    told = schedule([old, young], limits(free=0), lambda _: 0)
    assert told.preempted == [young]
    assert told.is_empty
    assert told.is_short_of_blocks


def test_one_that_is_loading_runs_apart() -> None:
    loading, other = prompt(0, 20, num_computed=8, is_loading=True), prompt(1, 6)
    told = plan([loading, other], limits(tokens=16))
    assert [(chunk.sequence, chunk.num_tokens) for chunk in told.chunks] == [(other, 6)]
    chunk = loading_chunk(loading, limits(tokens=10))
    assert chunk is not None
    assert (chunk.sequence, chunk.num_tokens, chunk.num_new_blocks) == (loading, 10, 0)
    assert loading_chunk(replace(loading, hand_over=True), limits(hand_over=0)) is None


def test_one_that_is_loading_gives_way_unless_its_layers_may_have_left() -> None:
    old = decoding(0, 5)
    leaving = prompt(1, 9, is_loading=True, hand_over=True)
    staying = prompt(1, 9, is_loading=True)
    told = plan([old, staying, leaving], limits(free=0))
    assert told.preempted == [staying]
    assert told.decodes == [old]
    assert not plan([old, leaving], limits(free=0)).preempted


def test_a_hand_over_stops_where_its_blocks_could_not_leave() -> None:
    job = prompt(0, 30, hand_over=True)
    chunk = plan([job], limits(hand_over=2, tokens=64)).chunks[0]
    assert (chunk.num_tokens, chunk.num_handed_blocks) == (8, 2)
    assert plan([job], limits(hand_over=0)).is_empty
    whole = plan([job], limits(hand_over=8, tokens=64)).chunks[0]
    assert (whole.num_tokens, whole.num_handed_blocks) == (30, 8), "the last block leaves partly filled"


def test_found_blocks_are_handed_over_within_the_budget_before_anything_is_computed() -> None:
    job = prompt(0, 30, num_computed=16, hand_over=True)
    first = plan([job], limits(hand_over=3)).chunks[0]
    assert (first.num_tokens, first.num_handed_blocks) == (0, 3)
    job.num_handed_blocks = 3
    second = plan([job], limits(hand_over=3)).chunks[0]
    assert (second.num_tokens, second.num_handed_blocks) == (8, 3)


def test_a_hand_over_that_was_preempted_hands_no_block_twice() -> None:
    job = prompt(0, 30, hand_over=True, num_handed_blocks=3)
    chunk = plan([job], limits(tokens=20)).chunks[0]
    assert (chunk.num_tokens, chunk.num_handed_blocks) == (20, 2)


def test_hand_overs_out_of_budget_do_not_hold_up_others() -> None:
    stuck, free = prompt(0, 30, hand_over=True), prompt(1, 10)
    told = plan([stuck, free], limits(hand_over=0))
    assert [chunk.sequence for chunk in told.chunks] == [free]


@st.composite
def lives(draw: st.DrawFn, num_blocks: int) -> list[Job]:
    jobs: list[Job] = []
    for arrival in range(draw(st.integers(1, 8))):
        num_tokens = draw(st.integers(1, num_blocks * SIZE - 1))
        most = num_blocks * SIZE - num_tokens
        hand_over = draw(st.booleans())
        num_new = 1 if hand_over else draw(st.integers(1, most))
        jobs.append(Job(arrival, num_tokens, num_new, hand_over=hand_over))
    return jobs


class House:
    """Applies schedules to jobs and a count of blocks, as the engine does."""

    def __init__(self, num_blocks: int, given_limits: Limits) -> None:
        self.num_free = num_blocks
        self.limits = given_limits
        self.jobs: list[Job] = []

    def step(self) -> Schedule[Job]:
        told = plan(self.jobs, replace(self.limits, num_free_blocks=self.num_free))
        self.check(told)
        for victim in told.preempted:
            self.give(victim, -victim.num_blocks)
            victim.num_computed = 0
            victim.num_preempted += 1
        for job in told.grown:
            self.give(job, 1)
        for chunk in told.chunks:
            self.give(chunk.sequence, chunk.num_new_blocks)
            chunk.sequence.num_handed_blocks += chunk.num_handed_blocks
            self.compute(chunk.sequence, chunk.num_tokens)
        for job in told.decodes:
            self.compute(job, 1)
        return told

    def give(self, job: Job, num_blocks: int) -> None:
        job.num_blocks += num_blocks
        self.num_free -= num_blocks
        assert self.num_free >= 0

    def compute(self, job: Job, num_tokens: int) -> None:
        job.num_computed += num_tokens
        assert job.num_computed <= job.num_blocks * SIZE
        if job.num_computed == job.num_tokens:
            job.num_tokens, job.num_new_tokens = job.num_tokens + 1, job.num_new_tokens - 1
            if not job.num_new_tokens:
                if job.hand_over:
                    assert job.num_handed_blocks == blocks_for(job.num_computed, SIZE)
                self.give(job, -job.num_blocks)
                self.jobs.remove(job)

    def check(self, told: Schedule[Job]) -> None:
        chunk_tokens = sum(chunk.num_tokens for chunk in told.chunks)
        assert len(told.decodes) + chunk_tokens <= self.limits.max_num_batched_tokens
        assert len(told.decodes) + len(told.chunks) <= self.limits.max_num_seqs
        handed = sum(chunk.num_handed_blocks for chunk in told.chunks)
        assert handed <= self.limits.num_hand_over_blocks
        scheduled = [*told.decodes, *(chunk.sequence for chunk in told.chunks)]
        assert len(set(map(id, [*scheduled, *told.preempted]))) == len(scheduled) + len(told.preempted)
        for victim in told.preempted:
            assert all(job.arrival < victim.arrival for job in scheduled)
        if told.preempted:
            spared = [job for job in self.jobs if job.num_blocks and job not in told.preempted]
            oldest_victim = min(victim.arrival for victim in told.preempted)
            assert all(job.arrival < oldest_victim for job in spared)
        for chunk in told.chunks:
            assert chunk.num_tokens or chunk.num_handed_blocks


@given(data=st.data(), num_blocks=st.integers(1, 9), seqs=st.integers(1, 5), extra=st.integers(0, 9))
def test_every_sequence_ends_whatever_the_sizes_and_the_order_of_arrival(
    data: st.DataObject, num_blocks: int, seqs: int, extra: int
) -> None:
    house = House(num_blocks, limits(seqs=seqs, tokens=seqs + extra, hand_over=data.draw(st.integers(1, 4))))
    coming = data.draw(lives(num_blocks))
    work = sum(job.num_tokens + job.num_new_tokens for job in coming)
    for _ in range(20 * work * len(coming)):
        if coming and (not house.jobs or data.draw(st.booleans())):
            job = coming.pop(0)
            if house.num_free:  # a reservation of the first block
                house.give(job, 1)
            house.jobs.append(job)
        oldest = house.jobs[0]
        before = (oldest.num_computed, oldest.num_handed_blocks, oldest.num_blocks)
        told = house.step()
        if oldest in house.jobs:
            after = (oldest.num_computed, oldest.num_handed_blocks, oldest.num_blocks)
            assert after != before or not oldest.num_blocks, "the oldest that holds blocks always goes on"
        assert not told.is_empty or told.preempted or oldest not in house.jobs or not oldest.num_blocks
        if not house.jobs and not coming:
            break
    assert not house.jobs
    assert not coming
    assert house.num_free == num_blocks


def test_what_a_decode_is() -> None:
    assert is_decode(decoding(0, 5))
    assert not is_decode(prompt(0, 5))
    assert not is_decode(prompt(0, 5, num_computed=4, hand_over=True))
