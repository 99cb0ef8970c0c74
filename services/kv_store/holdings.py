"""What a store tells of itself to who asks for all of it."""

import asyncio
from collections.abc import Iterator, Sequence

from libs.bus.messages.kv_events import Tier
from libs.kv.block_tree import DISK, MEMORY, BlockTree, Nodes
from libs.kv_events.snapshots import Holdings

TIERS = {MEMORY: Tier.DRAM, DISK: Tier.DISK}
PIECE_BLOCKS = 4096


async def holdings(tree: BlockTree, max_names: int | None) -> Holdings:
    """Names by tier, made while they are read. Of a tier with more than `max_names` blocks those alone that
    were used last, the latest first: an asker that can remember no more has the best of them."""
    newest: dict[int, Nodes] = {}
    for tier in TIERS:
        if max_names is not None and tree.num_in(tier) > max_names:
            newest[tier] = await asyncio.to_thread(tree.newest, tier, max_names)
    return _parts(tree, newest)


def _parts(tree: BlockTree, newest: dict[int, Nodes]) -> Iterator[tuple[Tier, Sequence[bytes]]]:
    for tier, told_as in TIERS.items():
        pieces = _still_in(tree, tier, newest[tier]) if tier in newest else tree.members(tier, PIECE_BLOCKS)
        for names in pieces:
            yield told_as, names


def _still_in(tree: BlockTree, tier: int, nodes: Nodes) -> Iterator[list[bytes]]:
    """In pieces, between which the tree may change. A number that was given to another block tells that one,
    which is here now."""
    for start in range(0, len(nodes), PIECE_BLOCKS):
        piece = nodes[start : start + PIECE_BLOCKS]
        yield tree.names_of(piece[tree.are_in(piece, tier) & tree.are_held(piece)])
