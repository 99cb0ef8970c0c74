"""All metrics of the KV store."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import TRANSFER_SECONDS_BUCKETS


class KvStoreMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_blocks = Gauge("kvmesh_store_num_blocks", "Blocks that can be found.", registry=registry)
        self.num_staged = Gauge(
            "kvmesh_store_num_staged_blocks", "Blocks on their way in, not found yet.", registry=registry
        )
        self.used_bytes = Gauge(
            "kvmesh_store_used_bytes", "Bytes of blocks held and staged.", registry=registry
        )
        self.cache_usage = Gauge(
            "kvmesh_kv_cache_usage_perc", "Share of the budget in use, 0 to 1.", registry=registry
        )
        self.num_links = Gauge("kvmesh_num_links", "Open Links.", registry=registry)
        self.queried_blocks = Counter(
            "kvmesh_store_queried_blocks_total", "Blocks asked for by name.", registry=registry
        )
        self.found_blocks = Counter(
            "kvmesh_store_found_blocks_total", "Blocks asked for and held.", registry=registry
        )
        self.evicted_blocks = Counter(
            "kvmesh_store_evicted_blocks_total", "Blocks that went for others.", registry=registry
        )
        self.puts = Counter(
            "kvmesh_store_puts_total",
            "Puts, by result: held, refused, corrupt, cut.",
            ["result"],
            registry=registry,
        )
        self.fetches = Counter(
            "kvmesh_store_fetches_total",
            "Fetches, by result: sent, missed, cut.",
            ["result"],
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "kvmesh_kv_transfer_bytes_total", "KV over Links.", ["direction"], registry=registry
        )
        self.transfer_seconds = Histogram(
            "kvmesh_kv_transfer_seconds",
            "One layer of a fetch, from reading it to its acceptance by the peer.",
            buckets=TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
