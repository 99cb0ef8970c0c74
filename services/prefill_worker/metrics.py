"""Metrics of the prefill worker; its gauges are those of every worker."""

from prometheus_client import CollectorRegistry, Counter, Histogram

from libs.telemetry.metrics import SECONDS_BUCKETS, TRANSFER_SECONDS_BUCKETS


class PrefillMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
