"""All metrics of the router."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.telemetry.metrics import SECONDS_BUCKETS


class RouterMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
        self.refused = Counter(
            "kvmesh_router_refused_total", "Requests refused, by reason.", ["reason"], registry=registry
        )
        self.queue_seconds = Histogram(
            "kvmesh_router_queue_seconds",
            "From the question to the answer, placed or refused.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
