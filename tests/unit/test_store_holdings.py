"""What a store tells of itself: all that it holds, or the part that was used last."""

import asyncio

import pytest

from libs.bus.messages.kv_events import Tier
from libs.kv.block_tree import DISK, MEMORY, BlockTree
from libs.kv_events.snapshots import Holdings
from services.kv_store.holdings import holdings

NAMES = [bytes([number]) * 16 for number in range(10)]


@pytest.fixture
def tree() -> BlockTree:
    """Ten blocks on disk, the even ones also in memory; in pairs, the later the younger."""
    tree = BlockTree(20)
    for number, name in enumerate(NAMES):
        tree.add(name, b"", DISK, number // 2)
        if number % 2 == 0:
            tree.add(name, b"", MEMORY, number // 2)
    return tree


def told(parts: Holdings) -> dict[Tier, list[int]]:
    told: dict[Tier, list[int]] = {}
    for tier, names in parts:
        told.setdefault(tier, []).extend(name[0] for name in names)
    return told


@pytest.mark.parametrize("max_names", [None, 10])
def test_who_can_remember_all_is_told_all(tree: BlockTree, max_names: int | None) -> None:
    everything = {Tier.DRAM: [0, 2, 4, 6, 8], Tier.DISK: list(range(10))}
    assert told(asyncio.run(holdings(tree, max_names))) == everything


def test_who_can_remember_few_is_told_of_each_tier_what_was_used_last(tree: BlockTree) -> None:
    tree.touch([tree.node_of(NAMES[2])], 9.0)
    assert told(asyncio.run(holdings(tree, 3))) == {Tier.DRAM: [2, 8, 6], Tier.DISK: [2, 8, 9]}


def test_what_goes_before_it_is_told_is_not_told(tree: BlockTree) -> None:
    parts = asyncio.run(holdings(tree, 4))
    tree.drop(tree.node_of(NAMES[9]), DISK)
    tree.add(b"new" * 5 + b"!", b"", MEMORY, 5.0)  # it is told as an event, and takes the number of the other
    assert told(parts) == {Tier.DRAM: [8, 6, 4, 2], Tier.DISK: [8, 6, 7]}
