"""When a block in memory is written to disk as well. Pure.

`write_through`: as soon as it is there. `write_back`: shortly before memory needs its place, and at the end.
`selective`: once it was asked for a second time; what nobody asks for again never costs a write.
"""

from typing import Literal

WritePolicy = Literal["write_through", "write_back", "selective"]

HITS_WORTH_A_WRITE = 2
FLUSHED_SHARE = 0.25
"""Of memory: what write_back keeps free, or on disk and next to go."""


def is_written_when_put(policy: WritePolicy) -> bool:
    """Whether new blocks are written at once."""
    return policy == "write_through"


def is_written_when_hit(policy: WritePolicy, num_hits: int) -> bool:
    """Whether a block with so many hits, the one just now among them, is worth a write."""
    return policy == "selective" and num_hits >= HITS_WORTH_A_WRITE


def is_written_at_the_end(policy: WritePolicy) -> bool:
    """Whether an orderly stop writes what memory alone has."""
    return policy == "write_back"


def num_blocks_to_flush(
    policy: WritePolicy, *, num_used_bytes: int, budget_bytes: int, block_bytes: int
) -> int:
    """How many of the blocks that go next should be on disk by now."""
    if policy != "write_back" or block_bytes < 1:
        return 0
    wanted_bytes = int(budget_bytes * FLUSHED_SHARE) - (budget_bytes - num_used_bytes)
    return max(0, -(-wanted_bytes // block_bytes))
