"""All metrics of the decode worker."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import TRANSFER_SECONDS_BUCKETS


class DecodeMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.num_requests_running = Gauge(
            "kvmesh_num_requests_running", "Sequences that take part in steps.", registry=registry
        )
        self.num_requests_waiting = Gauge(
            "kvmesh_num_requests_waiting", "Sequences that wait for a step.", registry=registry
        )
        self.num_requests_reserved = Gauge(
            "kvmesh_num_requests_reserved", "Sequences whose KV is on its way.", registry=registry
        )
        self.num_requests_held = Gauge(
            "kvmesh_num_requests_held", "Sequences that hold anything here.", registry=registry
        )
        self.num_used_blocks = Gauge(
            "kvmesh_num_used_blocks", "KV blocks that somebody holds.", registry=registry
        )
        self.num_blocks = Gauge("kvmesh_num_blocks", "KV blocks of the pool.", registry=registry)
        self.cache_usage = Gauge(
            "kvmesh_kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", registry=registry
        )
        self.num_links = Gauge("kvmesh_num_links", "Open Links.", registry=registry)
        self.num_unsent_deltas = Gauge(
            "kvmesh_num_unsent_deltas", "Token deltas that wait for the broker.", registry=registry
        )
        self.prompt_tokens = Counter(
            "kvmesh_prompt_tokens_total", "Tokens of prompts taken in.", registry=registry
        )
        self.generation_tokens = Counter(
            "kvmesh_generation_tokens_total", "Tokens generated.", registry=registry
        )
        self.transfer_bytes = Counter(
            "kvmesh_kv_transfer_bytes_total", "KV over Links.", ["direction"], registry=registry
        )
        self.adopt_seconds = Histogram(
            "kvmesh_kv_transfer_seconds",
            "From the first blocks of a sequence to its adoption.",
            buckets=TRANSFER_SECONDS_BUCKETS,
            registry=registry,
        )
        self.refused = Counter(
            "kvmesh_requests_refused_total", "Reservations refused, by reason.", ["reason"], registry=registry
        )
        self.failed = Counter(
            "kvmesh_requests_failed_total", "Sequences failed, by reason.", ["reason"], registry=registry
        )
