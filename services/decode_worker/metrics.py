"""Metrics of the decode worker; its gauges are those of every worker."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from libs.telemetry.metrics import TRANSFER_SECONDS_BUCKETS


class DecodeMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self.cache_queries = Counter(
            "kvmesh_prefix_cache_queries_total", "Tokens of prompts that ran here.", registry=registry
        )
        self.cache_hits = Counter(
            "kvmesh_prefix_cache_hits_total",
            "Those whose KV was found, here or in a store.",
            registry=registry,
        )
        self.not_kept = Counter(
            "kvmesh_finished_not_put_total",
            "Finished sequences that were not put, because too many waited.",
            registry=registry,
        )
