"""A registry of its own for each process."""

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from libs.telemetry.metrics import count_from, exposition, new_registry


def test_two_registries_in_one_process_know_nothing_of_each_other() -> None:
    first = new_registry(lambda: "router", "router-0", "ab12", version="1")
    second = new_registry(lambda: "router", "router-1", "cd34", version="1")
    for registry in (first, second):
        Counter("kvmesh_requests", "Requests.", registry=registry).inc()
    body, content_type = exposition(first)
    families = {f.name: f for f in text_string_to_metric_families(body.decode())}
    assert families["kvmesh_requests"].samples[0].value == 1
    assert content_type.startswith("text/plain")


def test_every_process_says_who_it_is() -> None:
    body, _ = exposition(new_registry(lambda: "router", "router-0", "ab12", version="1.2"))
    info = next(f for f in text_string_to_metric_families(body.decode()) if f.name == "kvmesh_service_info")
    assert info.samples[0].labels == {
        "service": "router", "name": "router-0", "incarnation": "ab12", "version": "1.2",
    }  # fmt: skip


def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    registry = new_registry(lambda: "router", "router-0", "ab12", version="1")
    body, content_type = exposition(registry, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_what_is_counted_elsewhere_is_read_at_each_scrape() -> None:
    registry, counts, num_lost = CollectorRegistry(), {"good": 1.0}, [2.0]
    count_from(registry, "kvmesh_reads_total", "Reads, by result.", lambda: counts, "result")
    count_from(registry, "kvmesh_lost_total", "Lost.", lambda: {"": num_lost[0]})
    counts["good"], num_lost[0] = 5.0, 7.0
    assert registry.get_sample_value("kvmesh_reads_total", {"result": "good"}) == 5
    assert registry.get_sample_value("kvmesh_lost_total") == 7
