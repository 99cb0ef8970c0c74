import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from libs.kv.block_index import BlockIndex


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def holding(*numbers: int, budget_blocks: int = 4) -> BlockIndex:
    index = BlockIndex(budget_bytes=budget_blocks * 100)
    assert index.stage(names(*numbers), 100, now=0.0) is not None
    index.commit(names(*numbers))
    return index


def test_a_staged_block_is_not_found_before_it_is_committed() -> None:
    index = BlockIndex(budget_bytes=400)
    staging = index.stage(names(1, 2), 100, now=0.0)
    assert staging is not None
    assert (staging.names, index.longest_prefix(names(1, 2))) == (tuple(names(1, 2)), 0)
    index.commit(names(1))
    assert index.longest_prefix(names(1, 2)) == 1
    index.discard(names(2))
    assert (index.num_used_bytes, index.num_staged, len(index)) == (100, 0, 1)


def test_the_longest_prefix_ends_at_the_first_gap() -> None:
    index = holding(1, 2, 4)
    assert index.longest_prefix(names(1, 2, 3, 4)) == 2
    assert index.longest_prefix(names(9, 1)) == 0
    assert index.longest_prefix([]) == 0


def test_the_least_recently_used_goes_first_and_the_tail_of_a_chain_before_its_head() -> None:
    index = holding(1, 2, 3, 4)
    index.use(names(1, 2))
    staging = index.stage(names(5, 6, 7), 100, now=0.0)
    assert staging is not None
    assert staging.evicted == tuple(names(4, 3, 2))


def test_known_blocks_are_not_staged_again_and_are_not_evicted_for_their_own_put() -> None:
    index = holding(1, 2, 3, 4)
    staging = index.stage(names(4, 5), 100, now=0.0)
    assert staging is not None
    assert (staging.names, staging.evicted) == (tuple(names(5)), tuple(names(3)))
    again = index.stage(names(4, 5), 100, now=0.0)
    assert again is not None
    assert again.names == ()


def test_pinned_and_read_blocks_stay_and_a_put_without_room_changes_nothing() -> None:
    index = holding(1, 2, 3, 4)
    index.use(names(1, 2), pinned_until=10.0)
    assert index.begin_reading(names(3, 4))
    before = index.num_used_bytes
    assert index.stage(names(5), 100, now=5.0) is None
    assert (index.num_used_bytes, len(index)) == (before, 4)
    index.end_reading(names(3, 4))
    staging = index.stage(names(5), 100, now=5.0)
    assert staging is not None
    assert staging.evicted == tuple(names(4))
    assert index.stage(names(6, 7, 8), 100, now=11.0) is not None


def test_reading_a_missing_block_keeps_none() -> None:
    index = holding(1, 2, budget_blocks=2)
    assert not index.begin_reading(names(1, 9))
    assert index.stage(names(5, 6), 100, now=0.0) is not None


def test_blocks_of_another_size_share_the_budget() -> None:
    index = holding(1, 2, 3, 4)
    staging = index.stage(names(5), 250, now=0.0)
    assert staging is not None
    assert len(staging.evicted) == 3
    assert index.num_used_bytes == 350
    assert index.stage(names(6), 401, now=0.0) is None


class IndexMachine(RuleBasedStateMachine):
    """Any order of puts, reads and pins keeps the budget and the promises."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(budget_bytes=1000)
        self.now = 0.0
        self.staged: list[tuple[bytes, ...]] = []
        self.reading: list[list[bytes]] = []
        self.pinned: dict[bytes, float] = {}

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6), size=st.sampled_from([60, 100]))
    def put(self, numbers: list[int], size: int) -> None:
        staging = self.index.stage(names(*numbers), size, self.now)
        if staging is not None:
            self.staged.append(staging.names)

    @rule(nth=st.integers(0, 9), is_complete=st.booleans())
    def end_put(self, nth: int, is_complete: bool) -> None:
        if self.staged:
            ended = self.staged.pop(nth % len(self.staged))
            (self.index.commit if is_complete else self.index.discard)(ended)

    @rule(numbers=st.lists(st.integers(0, 30), max_size=6))
    def find(self, numbers: list[int]) -> None:
        held = names(*numbers)[: self.index.longest_prefix(names(*numbers))]
        self.index.use(held, pinned_until=self.now + 5)
        self.pinned |= dict.fromkeys(held, self.now + 5)

    @rule(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6))
    def read(self, numbers: list[int]) -> None:
        if self.index.begin_reading(names(*numbers)):
            self.reading.append(names(*numbers))

    @rule(nth=st.integers(0, 9))
    def end_read(self, nth: int) -> None:
        if self.reading:
            self.index.end_reading(self.reading.pop(nth % len(self.reading)))

    @rule()
    def wait(self) -> None:
        self.now += 3

    @invariant()
    def the_budget_holds(self) -> None:
        assert 0 <= self.index.num_used_bytes <= self.index.budget_bytes
        assert self.index.num_staged == sum(len(staged) for staged in self.staged)

    @invariant()
    def promised_blocks_are_there(self) -> None:
        assert all(name in self.index for reading in self.reading for name in reading)
        assert all(name in self.index for name, until in self.pinned.items() if self.now < until)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_empty_index_at_its_end_uses_nothing() -> None:
    index = BlockIndex(budget_bytes=100)
    with pytest.raises(KeyError):
        index.discard(names(1))
    assert index.num_used_bytes == 0
