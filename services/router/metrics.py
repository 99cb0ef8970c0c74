"""All metrics of the router."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.kv_events.subscriber import KvSubscriber
from libs.kv_events.view import KvView
from libs.telemetry.metrics import SECONDS_BUCKETS, count_from

DECISION_BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)


class RouterMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.num_requests_waiting = Gauge(
            "kvmesh_num_requests_waiting", "Requests that wait for a place.", registry=registry
        )
        self.num_placements = Gauge(
            "kvmesh_router_num_placements",
            "Placements that are a few seconds old at most.",
            registry=registry,
        )
        self.num_instances = Gauge(
            "kvmesh_router_num_instances", "Instances that take requests.", ["kind"], registry=registry
        )
        self.placed = Counter("kvmesh_router_placed_total", "Requests placed.", registry=registry)
        self.decisions = Counter(
            "kvmesh_router_decisions_total",
            "Placements by where the beginning of the prompt's KV is expected to come from.",
            ["kind"],
            registry=registry,
        )
        self.predicted_ttft_seconds = Histogram(
            "kvmesh_router_predicted_ttft_seconds",
            "From the placement to the first token, as predicted.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "kvmesh_router_decision_seconds",
            "What one look at the queue took, mostly one decision.",
            buckets=DECISION_BUCKETS,
            registry=registry,
        )
        self.num_known_blocks = Gauge(
            "kvmesh_router_num_known_blocks", "Blocks whose holders are known.", registry=registry
        )
        self.num_publishers_behind = Gauge(
            "kvmesh_router_num_publishers_behind",
            "Holders of KV that are being asked anew what they hold.",
            registry=registry,
        )
        self.refused = Counter(
            "kvmesh_router_refused_total", "Requests refused, by reason.", ["reason"], registry=registry
        )
        self.queue_seconds = Histogram(
            "kvmesh_router_queue_seconds",
            "From the question to the answer, placed or refused.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )

    def watch_view(self, view: KvView, subscriber: KvSubscriber) -> None:
        """What is known of blocks, and how it came to be known: read when it is scraped."""
        self.num_known_blocks.set_function(lambda: len(view))
        self.num_publishers_behind.set_function(lambda: subscriber.num_behind)
        count_from(
            self._registry,
            "kvmesh_router_forgotten_blocks_total",
            "Blocks forgotten, or never taken in, because more are known than may be.",
            lambda: {"": view.num_forgotten_total},
        )
        count_from(
            self._registry,
            "kvmesh_router_kv_snapshots_total",
            "Times that a holder of KV was asked anew what it holds, by result: taken, failed.",
            lambda: {"taken": subscriber.num_snapshots_total, "failed": subscriber.num_failures_total},
            "result",
        )
