"""Metrics of a worker's dealings with the KV stores."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import TRANSFER_SECONDS_BUCKETS


class StoreMetrics:
    """Declared once, in the registry of the process. `transfer_bytes` is the worker's, by direction."""

    def __init__(self, registry: CollectorRegistry, transfer_bytes: Counter) -> None:
        self.transfer_bytes = transfer_bytes
        self.lookups = Counter(
            "kvmesh_store_lookups_total",
            "Prefixes sought in the KV stores, by result: hit, none (not held), recompute (cheaper than to "
            "fetch), unwanted, missed, failed, corrupt.",
            ["result"],
            registry=registry,
        )
        self.fetched_blocks = Counter(
            "kvmesh_store_fetched_blocks_total",
            "Blocks fetched whole, by where the store had them: memory, disk.",
            ["tier"],
            registry=registry,
        )
        self.fetch_seconds = Histogram(
            "kvmesh_store_fetch_seconds",
            "One prefix, from the question to its last layer's arrival.",
            buckets=TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
        self.puts = Counter(
            "kvmesh_store_put_blocks_total",
            "Blocks for the KV stores, by result: sent, dropped.",
            ["result"],
            registry=registry,
        )
        self.num_put_bytes = Gauge(
            "kvmesh_store_put_kept_bytes", "KV kept until a store has it.", registry=registry
        )
