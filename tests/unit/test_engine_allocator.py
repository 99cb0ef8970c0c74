import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.engine.errors import OutOfBlocks
from libs.engine.memory.allocator import BlockAllocator

NUM_BLOCKS = 8
NAMES = st.integers(0, 11).map(lambda number: bytes([number]))


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    allocator = BlockAllocator(3)
    allocator.allocate(2)
    assert not allocator.can_allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_a_released_named_block_is_free_and_still_found() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.name(block, b"a")
    allocator.release([block])
    assert allocator.num_free == 2
    assert allocator.find([b"a", b"b"]) == [block]
    assert allocator.num_cached([block]) == 1
    allocator.acquire([block])
    assert allocator.num_used == 1


def test_changes_of_names_are_told_once_and_only_where_something_changed() -> None:
    allocator = BlockAllocator(1)

    def evict_and_name(name: bytes) -> None:
        (block,) = allocator.allocate(1)
        allocator.name(block, name)
        allocator.release([block])

    evict_and_name(b"a")
    evict_and_name(b"b")
    assert allocator.take_changes() == ([b"b"], [])
    assert allocator.take_changes() == ([], [])
    evict_and_name(b"c")
    evict_and_name(b"b")
    assert allocator.take_changes() == ([], [])
    allocator.forget_cached()
    assert allocator.take_changes() == ([], [b"b"])
    assert not allocator.names()


def test_only_the_longest_unbroken_prefix_is_found() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    for block, name in zip(blocks, (b"a", b"b", b"d"), strict=True):
        allocator.name(block, name)
    assert allocator.find([b"a", b"b", b"c", b"d"]) == blocks[:2]


def test_unnamed_blocks_go_first_then_the_longest_unused_name_with_tails_before_heads() -> None:
    allocator = BlockAllocator(4)
    head, tail, other, plain = allocator.allocate(4)
    for block, name in ((head, b"h"), (tail, b"t"), (other, b"o")):
        allocator.name(block, name)
    allocator.release([head, tail])
    allocator.release([other])
    allocator.release([plain])
    assert allocator.allocate(1) == [plain]
    assert allocator.allocate(1) == [tail]
    assert allocator.find([b"h", b"t"]) == [head]
    assert allocator.allocate(2) == [head, other]
    assert allocator.names() == []


def test_two_blocks_of_equal_content_leave_the_name_with_the_first() -> None:
    allocator = BlockAllocator(2)
    first, second = allocator.allocate(2)
    allocator.name(first, b"a")
    allocator.name(second, b"a")
    assert allocator.find([b"a"]) == [first]
    allocator.release([first, second])
    assert allocator.num_free == 2
    assert allocator.allocate(1) == [second], "the one without a name goes first"
    assert allocator.find([b"a"]) == [first]


def test_forgetting_frees_what_only_its_name_kept() -> None:
    allocator = BlockAllocator(2)
    first, second = allocator.allocate(2)
    allocator.name(first, b"a")
    allocator.name(second, b"b")
    allocator.release([first])
    allocator.forget_cached()
    assert allocator.find([b"a"]) == []
    assert allocator.find([b"b"]) == [second]


class AllocatorMachine(RuleBasedStateMachine):
    """Holders take, share, name and give back blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.holders: list[list[int]] = []

    @property
    def named(self) -> set[int]:
        return {block for name in self.allocator.names() for block in self.allocator.find([name])}

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if not self.allocator.can_allocate(count):
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(count)
            return
        held = {block for holder in self.holders for block in holder}
        taken = self.allocator.allocate(count)
        assert len(set(taken)) == count
        assert not held & set(taken)
        assert not self.named & set(taken)
        self.holders.append(taken)

    @rule(names=st.lists(NAMES, max_size=3, unique=True))
    def share(self, names: list[bytes]) -> None:
        found = self.allocator.find(names)
        free, cost = self.allocator.num_free, self.allocator.num_cached(found)
        self.allocator.acquire(found)
        assert self.allocator.num_free == free - cost
        self.holders.append(found)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=NAMES)
    def name(self, data: st.DataObject, name: bytes) -> None:
        holder = data.draw(st.sampled_from([holder for holder in self.holders if holder]))
        block = data.draw(st.sampled_from(holder))
        had_a_name = block in self.named
        self.allocator.name(block, name)
        assert had_a_name or self.allocator.find([name])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        others = {block for other in self.holders for block in other}
        free = self.allocator.num_free
        assert self.allocator.num_exclusive(holder) == len(set(holder) - others)
        self.allocator.release(holder)
        assert self.allocator.num_free == free + len(set(holder) - others)

    @invariant()
    def used_blocks_are_those_that_somebody_holds(self) -> None:
        held = {block for holder in self.holders for block in holder}
        assert self.allocator.num_used == len(held)
        assert held <= self.allocator.live()


TestAllocator = AllocatorMachine.TestCase
