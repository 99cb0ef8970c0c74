"""What a store counts itself: for its metrics, and for the load that it publishes."""

from libs.bus.messages.kv_events import Tier
from libs.cost.load import TierLoad
from libs.kv.block_tree import DISK, MEMORY
from services.kv_store.metrics import KvStoreMetrics
from services.kv_store.store import Store


def read_memory(metrics: KvStoreMetrics, store: Store) -> None:
    """What can be found, and the tier in memory."""
    blocks, tree, slab = store.blocks, store.blocks.tree, store.blocks.slab
    metrics.num_blocks.set_function(lambda: len(tree))
    metrics.num_staged.set_function(lambda: blocks.num_staged)
    metrics.used_bytes.set_function(lambda: slab.num_used_bytes)
    metrics.cache_usage.set_function(lambda: slab.num_used_bytes / slab.budget_bytes)
    metrics.tier_blocks.labels("dram").set_function(lambda: tree.num_in(MEMORY))
    metrics.tier_bytes.labels("dram").set_function(lambda: slab.num_used_bytes)
    metrics.tier_capacity.labels("dram").set(slab.budget_bytes)
    metrics.count_from(
        "store_evicted_blocks_total",
        "Blocks that went for others, from either tier.",
        lambda: {"": sum(blocks.num_evicted.values())},
    )
    metrics.count_from(
        "store_tier_evicted_blocks_total",
        "Blocks that went from a tier for others.",
        lambda: {"dram": blocks.num_evicted[MEMORY], "disk": blocks.num_evicted[DISK]},
        "tier",
    )
    rechecks = store.rechecks
    metrics.count_from(
        "store_rechecked_blocks_total",
        "Blocks that a worker found corrupt, by the result here: right, dropped (with what followed them).",
        lambda: {"right": rechecks.num_right, "dropped": rechecks.num_dropped},
        "result",
    )
    if (trace := store.trace) is not None:
        metrics.count_from(
            "store_trace_dropped_total",
            "Lines of the access trace that were not written.",
            lambda: {"": trace.num_dropped},
        )


def read_disk(metrics: KvStoreMetrics, store: Store) -> None:
    """The tier on disk, if there is one."""
    disk, loader, writer, tree = store.disk, store.loader, store.writer, store.blocks.tree
    if disk is None or loader is None or writer is None:
        return
    counts = disk.counts
    metrics.num_loading.set_function(lambda: loader.num_loading)
    metrics.num_waiting.set_function(lambda: writer.num_waiting)
    metrics.tier_blocks.labels("disk").set_function(lambda: tree.num_in(DISK))
    metrics.tier_bytes.labels("disk").set_function(lambda: disk.num_file_bytes)
    metrics.tier_capacity.labels("disk").set(disk.cap_bytes)
    metrics.disk_paused.set_function(lambda: float(disk.is_paused))
    metrics.count_from(
        "store_disk_reads_total",
        "Blocks read from disk, each layer group for itself, by result: read, missing, corrupt, failed.",
        lambda: {
            "read": counts.num_read,
            "missing": counts.num_missing,
            "corrupt": counts.num_corrupt,
            "failed": counts.num_failed,
        },
        "result",
    )
    metrics.count_from(
        "store_disk_writes_total",
        "Blocks written to disk, or skipped: no room, paused, too many waited, or gone from memory first.",
        lambda: {"written": counts.num_written, "skipped": writer.num_skipped},
        "result",
    )
    metrics.count_from(
        "store_disk_write_errors_total", "Writes the disk refused.", lambda: {"": counts.num_write_errors}
    )
    metrics.count_from(
        "store_disk_pauses_total",
        "Times that writing to disk was given up for a while.",
        lambda: {"": counts.num_pauses},
    )
    metrics.count_from(
        "store_disk_lost_at_open_total",
        "Blocks that an earlier life left and that were not whole at the start.",
        lambda: {"": counts.num_lost_at_open},
    )
    metrics.count_from(
        "store_disk_index_repairs_total",
        "Times that a damaged index was dropped with all blocks on disk.",
        lambda: {"": counts.num_index_drops},
    )


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
