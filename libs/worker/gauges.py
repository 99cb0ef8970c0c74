"""What every worker holds right now, whichever its role."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from libs.cost.load import WorkerLoad
from libs.engine.engine import Engine


class WorkerGauges:
    """Declared once, in the registry of the process. Each is read when it is scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"kvmesh_{name}", meaning, registry=registry)

        self.num_requests_running = gauge("num_requests_running", "Requests that take part in steps.")
        self.num_requests_waiting = gauge("num_requests_waiting", "Requests that wait for a step.")
        self.num_requests_reserved = gauge("num_requests_reserved", "Requests whose KV is on its way.")
        self.num_requests_held = gauge("num_requests_held", "Requests that hold anything here.")
        self.num_used_blocks = gauge("num_used_blocks", "KV blocks that somebody holds.")
        self.num_blocks = gauge("num_blocks", "KV blocks of the pool.")
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self.busy_share = gauge("busy_share", "Busy seconds of the device per second.")
        self.hosted_busy_share = gauge(
            "hosted_busy_share", "The part of them that modules of other instances took."
        )
        self.away_share = gauge(
            "away_share", "Seconds per second that steps waited for modules on other workers."
        )
        self.num_links = gauge("num_links", "Open Links.")
        self.num_unsent_deltas = gauge("num_unsent_deltas", "Token deltas that wait for the broker.")

    def watch(
        self,
        engine: Engine,
        load: Callable[[], WorkerLoad],
        *,
        num_held: Callable[[], int],
        num_links: Callable[[], int],
        num_unsent_deltas: Callable[[], int],
    ) -> None:
        """Where the figures come from; `load` is what the worker reports to others."""
        self.num_requests_running.set_function(lambda: engine.load().num_running)
        self.num_requests_waiting.set_function(lambda: load().num_waiting)
        self.num_requests_reserved.set_function(lambda: load().num_reserved)
        self.num_requests_held.set_function(num_held)
        self.num_used_blocks.set_function(lambda: engine.num_total_blocks - engine.num_free_blocks)
        self.num_blocks.set_function(lambda: engine.num_total_blocks)
        self.cache_usage.set_function(lambda: 1 - engine.num_free_blocks / max(1, engine.num_total_blocks))
        self.busy_share.set_function(lambda: engine.load().busy_share)
        self.hosted_busy_share.set_function(lambda: engine.load().hosted_busy_share)
        self.away_share.set_function(lambda: engine.load().away_share)
        self.num_links.set_function(num_links)
        self.num_unsent_deltas.set_function(num_unsent_deltas)
