"""The tree of both tiers against a naive model, and the orders of eviction."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from libs.kv.block_forest import NO_NODE
from libs.kv.block_tree import DISK, MEMORY, TIERS, BlockTree, TreeFull
from libs.kv.eviction import EvictionKind

NUM_NAMES = 12


def name(number: int) -> bytes:
    return bytes([number * 37 % 256]) + number.to_bytes(15, "little")


@dataclass
class NaiveBlock:
    parent: bytes
    tiers: set[int] = field(default_factory=set[int])
    num_readers: int = 0
    leased_until: float = 0.0
    last_use: float = 0.0


class TreeMachine(RuleBasedStateMachine):
    """Blocks 0..11; the parent of block n is block n // 2, so that there are chains and forks."""

    kind: EvictionKind = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.tree = BlockTree(NUM_NAMES + 4, self.kind)
        self.held: dict[bytes, NaiveBlock] = {}
        self.reading: list[tuple[int, bytes]] = []
        self.doomed: set[int] = set()
        self.now = 0.0

    def children(self, of: bytes) -> set[bytes]:
        return {n for n, block in self.held.items() if block.parent == of}

    @rule(number=st.integers(1, NUM_NAMES), tier=st.sampled_from(TIERS), is_start=st.booleans())
    def add(self, number: int, tier: int, is_start: bool) -> None:
        parent = b"" if number == 1 or is_start else name(number // 2)
        try:
            node = self.tree.add(name(number), parent, tier, self.now)
        except TreeFull:
            assert len(self.held) + len(self.doomed) == self.tree.capacity
            return
        self.held.setdefault(name(number), NaiveBlock(parent, last_use=self.now)).tiers.add(tier)
        assert self.tree.name_of(node) == name(number)

    @rule(number=st.integers(1, NUM_NAMES))
    def touch(self, number: int) -> None:
        chain: list[bytes] = []
        while number:
            chain.insert(0, name(number))
            number //= 2
        nodes = self.tree.longest_prefix(chain)
        expected = next((i for i, n in enumerate(chain) if n not in self.held), len(chain))
        assert [self.tree.name_of(node) for node in nodes] == chain[:expected]
        self.now += 1
        self.tree.touch(nodes, self.now)
        for touched in chain[:expected]:
            self.held[touched].last_use = self.now

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.held)))
        self.tree.lease([self.tree.node_of(chosen)], self.now + 3)
        self.held[chosen].leased_until = self.now + 3

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def begin_reading(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.held)))
        node = self.tree.node_of(chosen)
        self.tree.begin_reading([node])
        self.reading.append((node, chosen))
        self.held[chosen].num_readers += 1

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        node, chosen = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        gone = self.tree.end_reading([node])
        if node in self.doomed:
            is_last = all(other != node for other, _ in self.reading)
            assert gone == ([node] if is_last else [])
        else:
            assert gone == []
            self.held[chosen].num_readers -= 1
        for each in gone:
            self.tree.forget(each)
            self.doomed.discard(each)

    @rule(tier=st.sampled_from(TIERS), num=st.integers(1, 6), spares_leased=st.booleans())
    def evict(self, tier: int, num: int, spares_leased: bool) -> None:
        victims = self.tree.plan_drops(tier, num, self.now, spares_leased=spares_leased)
        assert len(victims) == len(set(victims)) <= num
        for node in victims:
            self.drop(node, tier, spares_leased)
        if len(victims) < num:
            assert not [b for b in self.held if self.may_go(b, tier, spares_leased)]

    def may_go(self, chosen: bytes, tier: int, spares_leased: bool) -> bool:
        """What a child, a reader or a lease forbids, said once more and naively."""
        block, children = self.held[chosen], self.children(chosen)
        if tier not in block.tiers or block.num_readers or any(tier in self.held[c].tiers for c in children):
            return False
        if any(self.tree.parent_of(node) == self.tree.node_of(chosen) for node in self.doomed):
            return False
        is_leased = block.leased_until > self.now
        return not (is_leased and spares_leased) if len(block.tiers) > 1 else not (is_leased or children)

    def drop(self, node: int, tier: int, spares_leased: bool) -> None:
        chosen = self.tree.name_of(node)
        assert self.may_go(chosen, tier, spares_leased)
        block = self.held[chosen]
        block.tiers.discard(tier)
        assert self.tree.drop(node, tier) == (not block.tiers)
        if not block.tiers:
            del self.held[chosen]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def doom(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.held)))
        subtree, waiting = list[bytes](), [chosen]
        while waiting:
            subtree.append(waiting.pop())
            waiting += self.children(subtree[-1])
        nodes = {n: self.tree.node_of(n) for n in subtree}
        gone = self.tree.doom(nodes[chosen])
        read = {nodes[n] for n in subtree if self.held[n].num_readers}
        assert set(gone) == set(nodes.values()) - read
        for node in gone:
            self.tree.forget(node)
        self.doomed |= read
        for each in subtree:
            del self.held[each]

    @invariant()
    def what_can_be_found_is_what_is_held(self) -> None:
        assert len(self.tree) == len(self.held)
        found = {n for n in map(name, range(1, NUM_NAMES + 1)) if n in self.tree}
        assert found == set(self.held)
        assert self.tree.num_free == self.tree.capacity - len(self.held) - len(self.doomed)
        for tier in TIERS:
            members = {n for part in self.tree.members(tier, piece=3) for n in part}
            assert members == {n for n, block in self.held.items() if tier in block.tiers}

    @invariant()
    def the_newest_are_those_used_last(self) -> None:
        for tier in TIERS:
            uses = {n: block.last_use for n, block in self.held.items() if tier in block.tiers}
            newest = self.tree.names_of(self.tree.newest(tier, 3))
            assert len(newest) == len(set(newest))
            assert [uses[n] for n in newest] == sorted(uses.values(), reverse=True)[:3]

    @invariant()
    def a_child_hangs_from_its_parent_wherever_both_are_held(self) -> None:
        for each, block in self.held.items():
            node = self.tree.node_of(each)
            parent = self.tree.parent_of(node)
            if block.parent in self.held:
                assert parent == self.tree.node_of(block.parent)
            else:
                assert parent == NO_NODE
            assert self.tree.parent_name_of(node) == block.parent
            num_doomed = sum(self.tree.parent_of(other) == node for other in self.doomed)
            assert self.tree.num_children[node] == len(self.children(each)) + num_doomed


class LfuMachine(TreeMachine):
    kind = "lfu"


TestTreeLru = TreeMachine.TestCase
TestTreeLfu = LfuMachine.TestCase


def flat(kind: EvictionKind, num: int) -> BlockTree:
    tree = BlockTree(num, kind)
    for number in range(num):
        tree.add(name(number), b"", MEMORY, 0.0)
    return tree


def plan(tree: BlockTree, num: int) -> list[int]:
    return [tree.name_of(node)[0] for node in tree.plan_drops(MEMORY, num, 0.0)]


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    tree = flat("lru", 5)
    for number in (0, 3, 1):
        tree.touch([tree.node_of(name(number))], 1.0)
    assert plan(tree, 5) == [n * 37 for n in (2, 4, 0, 3, 1)]


def test_lfu_gives_up_what_was_used_least_often_and_old_fame_fades() -> None:
    tree = flat("lfu", 4)
    for number, num_hits in ((0, 9), (1, 2), (2, 5)):
        for _ in range(num_hits):
            tree.touch([tree.node_of(name(number))], 1.0)
    assert plan(tree, 4) == [n * 37 for n in (3, 1, 2, 0)]
    for _ in range(3):
        (victim,) = tree.plan_drops(MEMORY, 1, 0.0)
        tree.drop(victim, MEMORY)
    # The last victim had 5 hits: what comes now is level with that, and soon beats the 9 of long ago.
    tree.add(name(7), b"", MEMORY, 2.0)
    for _ in range(5):
        tree.touch([tree.node_of(name(7))], 2.0)
    assert plan(tree, 2) == [0, 7 * 37 % 256]


def test_a_new_block_does_not_inherit_the_fame_of_one_that_expired() -> None:
    tree = flat("lfu", 3)
    for _ in range(9):
        tree.touch([tree.node_of(name(0))], 1.0)
    for _ in range(2):
        tree.touch([tree.node_of(name(1)), tree.node_of(name(2))], 1.0)
    assert plan(tree, 3) == [1 * 37, 2 * 37, 0]
    tree.drop(tree.node_of(name(0)), MEMORY, for_room=False)
    tree.add(name(3), b"", MEMORY, 2.0)
    assert plan(tree, 3) == [3 * 37, 1 * 37, 2 * 37]


def test_a_block_that_names_its_own_descendant_as_its_parent_stays_a_root() -> None:
    tree = BlockTree(8)
    tree.add(name(1), name(3), MEMORY, 0.0)
    tree.add(name(2), name(1), MEMORY, 0.0)
    tree.add(name(3), name(2), MEMORY, 0.0)
    assert tree.parent_of(tree.node_of(name(1))) == NO_NODE
    assert len(tree.plan_drops(MEMORY, 3, 0.0)) == 3
    tree.add(name(4), name(4), MEMORY, 0.0)
    assert tree.parent_of(tree.node_of(name(4))) == NO_NODE


def test_a_full_tree_says_so_and_takes_more_when_something_went() -> None:
    tree = flat("lru", 3)
    with pytest.raises(TreeFull, match="3 blocks"):
        tree.add(name(9), b"", DISK, 0.0)
    tree.drop(tree.node_of(name(1)), MEMORY)
    tree.add(name(9), b"", DISK, 0.0)
    assert tree.are_in(np.array([tree.node_of(name(9))]), DISK).all()
