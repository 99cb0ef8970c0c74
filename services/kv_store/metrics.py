"""All metrics of the KV store."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import TRANSFER_SECONDS_BUCKETS, count_from


class KvStoreMetrics:
    """Declared once, in the registry of the process. `tier` is dram or disk."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvmesh_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvmesh_{name}", text, labels, registry=registry)

        self.num_blocks = gauge("store_num_blocks", "Blocks that can be found.")
        self.num_staged = gauge("store_num_staged_blocks", "Blocks on their way in, not found yet.")
        self.num_loading = gauge("store_num_loading_blocks", "Blocks on their way from disk into memory.")
        self.num_waiting = gauge("store_num_unwritten_blocks", "Blocks that wait to be written to disk.")
        self.used_bytes = gauge("store_used_bytes", "Bytes of memory of blocks held and staged.")
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of the memory in use, 0 to 1.")
        self.tier_blocks = gauge("store_tier_blocks", "Blocks in each tier.", "tier")
        self.tier_bytes = gauge("store_tier_bytes", "Their bytes.", "tier")
        self.tier_capacity = gauge("store_tier_capacity_bytes", "What each tier may take.", "tier")
        self.disk_paused = gauge("store_disk_paused", "1 while the disk takes no writes; reads go on.")
        self.num_links = gauge("num_links", "Open Links.")
        self.ttl_epoch = gauge("store_ttl_epoch", "Of the group TTLs in force.")
        self.queried_blocks = counter("store_queried_blocks_total", "Blocks asked for by name.")
        self.found_blocks = counter("store_found_blocks_total", "Blocks asked for and held.")
        self.tier_hits = counter("store_tier_hits_total", "Blocks found, by the fastest tier.", "tier")
        self.tier_misses = counter(
            "store_tier_misses_total", "Blocks asked for and not in this tier, nor in a faster one.", "tier"
        )
        self.promoted = counter("store_promoted_blocks_total", "Blocks brought from disk into memory.")
        self.expired = counter("store_expired_blocks_total", "Blocks unused for longer than they are kept.")
        self.puts = counter("store_puts_total", "Puts, by result: held, refused, corrupt, cut.", "result")
        self.fetches = counter("store_fetches_total", "Fetches, by result: sent, missed, cut.", "result")
        self.transfer_bytes = counter("kv_transfer_bytes_total", "KV over Links.", "direction")
        self.transfer_seconds = Histogram(
            "kvmesh_kv_transfer_seconds",
            "One layer of a fetch, from its reading to its acceptance by the peer.",
            buckets=TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
        for counted, labels in (
            (self.tier_hits, ("dram", "disk")),
            (self.tier_misses, ("dram", "disk")),
            (self.puts, ("held", "refused", "corrupt", "cut")),
            (self.fetches, ("sent", "missed", "cut")),
        ):
            for label in labels:
                counted.labels(label)  # there from the start, as 0
        self._registry = registry

    def count_from(
        self, name: str, text: str, values: Callable[[], dict[str, float]], label: str = ""
    ) -> None:
        """See libs.telemetry.metrics."""
        count_from(self._registry, f"kvmesh_{name}", text, values, label)
