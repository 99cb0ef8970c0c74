"""Metrics of a worker, whatever its role."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.cost.load import WorkerLoad
from libs.engine.engine import Engine
from libs.telemetry.metrics import SECONDS_BUCKETS, TRANSFER_SECONDS_BUCKETS


class WorkerMetrics:
    """Counts and times; declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"kvmesh_{name}", meaning, labels, registry=registry)

        def histogram(
            name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS
        ) -> Histogram:
            return Histogram(f"kvmesh_{name}", meaning, labels, buckets=buckets, registry=registry)

        self.prompt_tokens = counter(
            "prompt_tokens_total", "Tokens of prompts: run, or taken in to be answered here."
        )
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated.")
        self.cache_queries = counter(
            "prefix_cache_queries_total", "Tokens of prompts that ran here, looked up here and in the stores."
        )
        self.cache_hits = counter("prefix_cache_hits_total", "Those of them whose KV was found.")
        self.transfer_bytes = counter("kv_transfer_bytes_total", "KV over Links.", "direction")
        self.transfer_seconds = histogram(
            "kv_transfer_seconds",
            "Sent: one layer of a chunk, from its making to its acceptance. Received: one prompt, from its "
            "first blocks to its first token.",
            "direction",
            buckets=TRANSFER_SECONDS_BUCKETS,
        )
        self.queue_seconds = histogram(
            "request_queue_time_seconds",
            "From the arrival of a prompt that is handed over to its first step.",
        )
        self.prefill_seconds = histogram(
            "request_prefill_time_seconds", "From the first step of such a prompt to its hand-over."
        )
        self.refused = counter("requests_refused_total", "Requests refused, by reason.", "reason")
        self.failed = counter("requests_failed_total", "Requests failed, by reason.", "reason")
        self.role_changes = counter("role_flips_total", "Changes of role since this process was started.")
        self.not_kept = counter(
            "finished_not_put_total", "Finished sequences that were not put, because too many waited."
        )


def watch_worker(
    registry: CollectorRegistry,
    engine: Engine,
    load: Callable[[], WorkerLoad],
    *,
    num_held: Callable[[], int],
    num_links: Callable[[], int],
    num_unsent_deltas: Callable[[], int],
) -> None:
    """Gauges of what the worker holds, each read when it is scraped. `load` is what it reports to others."""

    def gauge(name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(f"kvmesh_{name}", meaning, registry=registry).set_function(value)

    gauge("num_requests_running", "Requests that take part in steps.", lambda: engine.load().num_running)
    gauge("num_requests_waiting", "Requests that wait for a step.", lambda: load().num_waiting)
    gauge("num_requests_reserved", "Requests whose KV is on its way.", lambda: load().num_reserved)
    gauge("num_requests_held", "Requests that hold anything here.", num_held)
    gauge(
        "num_used_blocks",
        "KV blocks that somebody holds.",
        lambda: engine.num_total_blocks - engine.num_free_blocks,
    )
    gauge("num_blocks", "KV blocks of the pool.", lambda: engine.num_total_blocks)
    gauge(
        "kv_cache_usage_perc",
        "Share of the KV blocks in use, 0 to 1.",
        lambda: 1 - engine.num_free_blocks / max(1, engine.num_total_blocks),
    )
    gauge("busy_share", "Busy seconds of the device per second.", lambda: engine.load().busy_share)
    gauge(
        "hosted_busy_share",
        "The part of them that modules of other instances took.",
        lambda: engine.load().hosted_busy_share,
    )
    gauge(
        "away_share",
        "Seconds per second that steps waited for modules on other workers.",
        lambda: engine.load().away_share,
    )
    gauge("num_links", "Open Links.", num_links)
    gauge("num_unsent_deltas", "Token deltas that wait for the broker.", num_unsent_deltas)
