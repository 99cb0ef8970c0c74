"""All metrics of the prefill worker."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import SECONDS_BUCKETS, TRANSFER_SECONDS_BUCKETS


class PrefillMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._declare_gauges(registry)
        self.prompt_tokens = Counter(
            "kvmesh_prompt_tokens_total", "Tokens of prompts run.", registry=registry
        )
        self.cache_queries = Counter(
            "kvmesh_prefix_cache_queries_total",
            "Prompt tokens looked up, here and in the store.",
            registry=registry,
        )
        self.cache_hits = Counter(
            "kvmesh_prefix_cache_hits_total", "Prompt tokens whose KV was found.", registry=registry
        )
        self.store_fetches = Counter(
            "kvmesh_store_lookups_total",
            "Prefixes sought in the KV store, by result: hit, none, failed, corrupt.",
            ["result"],
            registry=registry,
        )
        self.store_puts = Counter(
            "kvmesh_store_put_blocks_total", "Blocks for the KV store, by result: sent, dropped.", ["result"],
            registry=registry,
        )  # fmt: skip
        self.transfer_bytes = Counter(
            "kvmesh_kv_transfer_bytes_total", "KV over Links.", ["direction"], registry=registry
        )
        self.transfer_seconds = Histogram(
            "kvmesh_kv_transfer_seconds",
            "One layer of a chunk, from its making to its acceptance by the peer.",
            buckets=TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "kvmesh_request_queue_time_seconds",
            "From a prompt's arrival to its first step.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.prefill_seconds = Histogram(
            "kvmesh_request_prefill_time_seconds",
            "From a prompt's first step to its hand-over.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.refused = Counter(
            "kvmesh_requests_refused_total", "Prompts refused, by reason.", ["reason"], registry=registry
        )
        self.failed = Counter(
            "kvmesh_requests_failed_total", "Prompts failed, by reason.", ["reason"], registry=registry
        )

    def _declare_gauges(self, registry: CollectorRegistry) -> None:
        self.num_requests_running = Gauge(
            "kvmesh_num_requests_running", "Prompts that take part in steps.", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "kvmesh_num_requests_waiting", "Prompts that wait for a step.", registry=registry
        )
        self.num_requests_held = Gauge(
            "kvmesh_num_requests_held", "Prompts that hold anything here.", registry=registry
        )
        self.num_used_blocks = Gauge(
            "kvmesh_num_used_blocks", "KV blocks that somebody holds.", registry=registry
        )
        self.num_blocks = Gauge("kvmesh_num_blocks", "KV blocks of the pool.", registry=registry)
        self.cache_usage = Gauge(
            "kvmesh_kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", registry=registry
        )
        self.num_links = Gauge("kvmesh_num_links", "Open Links.", registry=registry)
        self.num_put_bytes = Gauge(
            "kvmesh_store_put_kept_bytes", "KV kept until the store has it.", registry=registry
        )
