"""How much of a trace one store would find, without time: the live block tree under a number of blocks."""

from collections.abc import Iterable

from libs.kv.block_tree import MEMORY, BlockTree
from libs.kv.eviction import EvictionKind
from libs.simulator.trace import TraceRequest


def hit_rate(requests: Iterable[TraceRequest], num_blocks: int, eviction: EvictionKind = "lru") -> float:
    """The share of all prompts' blocks that is found as a prefix held in memory of `num_blocks`.

    0 for requests without blocks.
    """
    tree = BlockTree(num_blocks, eviction)
    num_asked = num_found = 0
    for request in requests:
        names, now = request.names, request.arrival_seconds
        found = tree.longest_prefix(names)
        num_asked += len(names)
        num_found += len(found)
        tree.touch(found, now)
        tree.begin_reading(found)
        num_wanted = min(len(names), num_blocks) - len(found)
        for node in tree.plan_drops(MEMORY, num_wanted + len(tree) - num_blocks, now):
            tree.drop(node, MEMORY)
        tree.end_reading(found)
        chain = [b"", *names]
        for at in range(len(found), min(len(names), len(found) + num_blocks - len(tree))):
            tree.add(chain[at + 1], chain[at], MEMORY, now)
    return num_found / num_asked if num_asked else 0.0
