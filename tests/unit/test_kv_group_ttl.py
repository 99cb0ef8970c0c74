"""Which blocks have expired: nearest group counts, children go first, work is bounded."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.kv import group_ttl
from libs.kv.block_tree import DISK, MEMORY, BlockTree
from libs.kv.group_ttl import GroupTtl


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tree_of(num: int) -> BlockTree:
    """Block n hangs from block n // 2; block 1 is the root. All used at time 0."""
    tree = BlockTree(num + 1)
    for number in range(1, num + 1):
        tree.add(name(number), name(number // 2) if number > 1 else b"", MEMORY, 0.0)
    return tree


def expire(tree: BlockTree, ttl: GroupTtl, now: float) -> None:
    """As the store does it, until a whole round changes nothing."""
    num_before = -1
    while len(tree) != num_before:
        num_before = len(tree)
        for _ in range(tree.num_nodes):
            for node in ttl.sweep(now, 3):
                for each in ttl.expired_chain(node, now):
                    for tier in (MEMORY, DISK):
                        if tree.is_in(each, tier):
                            tree.drop(each, tier, for_room=False)


def held(tree: BlockTree) -> set[int]:
    return {int.from_bytes(n, "big") for tier in (MEMORY, DISK) for part in tree.members(tier) for n in part}


@given(
    num=st.integers(1, 24),
    ttls=st.dictionaries(st.integers(1, 24), st.floats(1, 100), max_size=5),
    rest=st.none() | st.floats(1, 100),
    now=st.floats(0, 120),
    kept=st.sets(st.integers(1, 24), max_size=3),
)
def test_a_block_stays_as_long_as_its_nearest_group_says_or_something_hangs_from_it(
    num: int, ttls: dict[int, float], rest: float | None, now: float, kept: set[int]
) -> None:
    tree = tree_of(num)
    ttl = GroupTtl(tree, 5.0)
    assert ttl.accept(1, rest, {name(number): seconds for number, seconds in ttls.items()})
    for number in kept & set(range(1, num + 1)):
        tree.begin_reading([tree.node_of(name(number))])

    def own_ttl(number: int) -> float:
        while number:
            if number in ttls:
                return ttls[number]
            number //= 2
        return float("inf") if rest is None else rest

    stays = {n for n in range(1, num + 1) if own_ttl(n) >= now or n in kept}
    expected = {a for n in stays for a in (n >> shift for shift in range(n.bit_length()))}
    expire(tree, ttl, now)
    assert held(tree) == expected


def test_only_a_newer_epoch_changes_anything() -> None:
    tree = tree_of(3)
    ttl = GroupTtl(tree, None)
    assert ttl.is_endless
    assert ttl.accept(-3, 7.0, {})
    assert not ttl.accept(-3, 1.0, {})
    assert not ttl.accept(-4, 1.0, {name(1): 2.0})
    assert (ttl.epoch, ttl.ttl_of(1), ttl.is_endless) == (-3, 7.0, False)
    assert ttl.accept(9, None, {name(2): 2.0})
    assert (ttl.ttl_of(tree.node_of(name(3))), ttl.ttl_of(tree.node_of(name(2)))) == (float("inf"), 2.0)
    assert ttl.group_name_of(tree.node_of(name(2))) == name(2)
    assert ttl.group_name_of(tree.node_of(name(3))) == b""


def test_a_block_joins_its_group_when_its_parent_comes_later() -> None:
    tree = BlockTree(8)
    ttl = GroupTtl(tree, None)
    ttl.accept(1, None, {name(1): 3.0})
    late = tree.add(name(3), name(2), MEMORY, 0.0)
    assert ttl.ttl_of(late) == float("inf")
    tree.add(name(1), b"", MEMORY, 0.0)
    tree.add(name(2), name(1), MEMORY, 0.0)
    assert ttl.ttl_of(late) == 3.0


def test_leased_blocks_do_not_expire_and_free_numbers_are_passed_over() -> None:
    tree = tree_of(2)
    ttl = GroupTtl(tree, 1.0)
    tree.lease([tree.node_of(name(2))], 10.0)
    expire(tree, ttl, 5.0)
    assert held(tree) == {1, 2}
    expire(tree, ttl, 11.0)
    assert held(tree) == set()
    assert ttl.sweep(12.0, 100) == []
    assert ttl.expired_chain(0, 12.0) == []


def test_a_sweep_works_out_few_groups_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_ttl, "MAX_UNKNOWN", 4)
    tree = BlockTree(16)
    for number in range(16):
        tree.add(name(number), b"", MEMORY, 0.0)
    ttl = GroupTtl(tree, 1.0)
    found = [len(ttl.sweep(5.0, 100)) for _ in range(4)]
    assert found == [4, 4, 4, 4]
    assert len(ttl.sweep(5.0, 100)) == 16
    assert np.all(tree.group == group_ttl.REST)
