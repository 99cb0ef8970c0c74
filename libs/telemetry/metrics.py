"""Prometheus helpers. A program declares all its metrics in one file, in the registry of its runtime."""

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""For time to first token, queues and whole requests."""

TOKEN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
"""For the time between two tokens."""

TRANSFER_SECONDS_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.5,
    1.0,
    5.0,
)
"""For tensors between processes."""


def new_registry(
    service: Callable[[], str], name: str, incarnation: str, *, version: str
) -> CollectorRegistry:
    """A registry with the process's own metrics and `kvmesh_service_info`; never the global one. What the
    service is may change while it runs."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(_ServiceInfo(service, {"name": name, "incarnation": incarnation, "version": version}))
    return registry


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """The body of /metrics and its content type, in the format that the `accept` header asks for."""
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def count_from(
    registry: CollectorRegistry,
    name: str,
    text: str,
    values: Callable[[], Mapping[str, float]],
    label: str = "",
) -> None:
    """A counter that is read where it is kept: by `label`, or without, under the key ""."""
    registry.register(_Kept(name, text, values, label))


class _ServiceInfo(Collector):
    def __init__(self, service: Callable[[], str], labels: Mapping[str, str]) -> None:
        self._service, self._labels = service, labels

    def collect(self) -> Any:
        labels = {"service": self._service(), **self._labels}
        info = GaugeMetricFamily("kvmesh_service_info", "Who this process is.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        yield info

    def describe(self) -> Any:
        """Without values: the service may not be there yet."""
        return [GaugeMetricFamily("kvmesh_service_info", "Who this process is.")]


class _Kept(Collector):
    def __init__(self, name: str, text: str, values: Callable[[], Mapping[str, float]], label: str) -> None:
        self._name, self._text, self._values, self._label = name, text, values, label

    def collect(self) -> Any:
        labels = [self._label] if self._label else []
        family = CounterMetricFamily(self._name, self._text, labels=labels)
        for key, value in self._values().items():
            family.add_metric([key] if self._label else [], value)
        yield family

    def describe(self) -> Any:
        """Without values: they may not be there yet."""
        return [CounterMetricFamily(self._name, self._text)]
