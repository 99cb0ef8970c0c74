"""Metrics of a publisher of KV events."""

from prometheus_client import CollectorRegistry, Gauge

from libs.kv_events.publisher import KvEventPublisher
from libs.telemetry.metrics import count_from


def watch_publisher(registry: CollectorRegistry, publisher: KvEventPublisher) -> None:
    """Declare them, once in a process. They are read when they are scraped."""
    waiting = Gauge(
        "kvmesh_kv_events_waiting_names",
        "Names of blocks in KV events that are not published yet.",
        registry=registry,
    )
    waiting.set_function(lambda: publisher.num_waiting_names)
    count_from(
        registry,
        "kvmesh_kv_events_overflows_total",
        "Times that too many KV events waited, so that followers have to ask for everything anew.",
        lambda: {"": publisher.num_overflows_total},
    )
