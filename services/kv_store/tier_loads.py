"""What a store tells the mesh of its tiers."""

from libs.bus.messages.kv_events import Tier
from libs.cost.load import TierLoad
from libs.kv.block_tree import DISK, MEMORY
from services.kv_store.store import Store


def tier_loads(store: Store) -> tuple[TierLoad, ...]:
    """Memory, then disk where there is one."""
    tree, slab, disk = store.blocks.tree, store.blocks.slab, store.disk
    memory = TierLoad(
        tier=Tier.DRAM.value,
        num_blocks=tree.num_in(MEMORY),
        num_bytes=slab.num_used_bytes,
        capacity_bytes=slab.budget_bytes,
        num_hit_blocks=store.num_hit_blocks[MEMORY],
        num_asked_blocks=store.num_asked_blocks,
    )
    if disk is None:
        return (memory,)
    on_disk = TierLoad(
        tier=Tier.DISK.value,
        num_blocks=tree.num_in(DISK),
        num_bytes=disk.num_file_bytes,
        capacity_bytes=disk.cap_bytes,
        num_hit_blocks=store.num_hit_blocks[DISK],
        num_asked_blocks=store.num_asked_blocks,
        is_paused=disk.is_paused,
    )
    return memory, on_disk
