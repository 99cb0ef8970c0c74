"""Metrics of moves and of modules that run elsewhere, or here for others."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.bus.messages.migration import MigrationRecord
from libs.placement.migration import MigrationPhase
from libs.placement.placement import HostedModuleStatus

_PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PAUSE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class MigrationMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"kvmesh_{name}", meaning, labels, registry=registry)

        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"kvmesh_{name}", meaning, registry=registry)

        def histogram(name: str, meaning: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"kvmesh_{name}", meaning, labels, buckets=buckets, registry=registry)

        what = "How long a phase of a move of this instance took."
        self.phase_seconds = histogram("migration_phase_seconds", what, _PHASE_BUCKETS, "phase")
        what = "What moves of this instance copied: kv or weights."
        self.bytes = counter("migration_bytes_total", what, "what")
        what = "How long a switch kept this instance from its steps."
        self.pause_seconds = histogram("migration_pause_seconds", what, _PAUSE_BUCKETS)
        what = "Moves of this instance that ended, by outcome: done or failed."
        self.migrations = counter("migrations_total", what, "outcome")
        what = "Hosts that were lost with modules of this instance."
        self.hosts_lost = counter("hosts_lost_total", what)
        what = "From a call to a host of modules of this instance to its answer."
        self.host_call_seconds = histogram("host_call_seconds", what, _STEP_BUCKETS)
        what = "From a guest's call, which is layers or an attention of its step, to its result."
        self.hosted_call_seconds = histogram("hosted_step_seconds", what, _STEP_BUCKETS)
        what = "Modules of other instances that run here."
        self._hosted_modules = gauge("hosted_modules", what)
        what = "Memory that modules of other instances take here."
        self._hosted_bytes = gauge("hosted_bytes", what)
        what = "How often this instance's placement changed."
        self._epoch = gauge("placement_epoch", what)
        what = "Modules of this instance on other workers."
        self._modules_away = gauge("modules_away", what)

    def watch(
        self,
        hosted: Callable[[], tuple[HostedModuleStatus, ...]],
        epoch: Callable[[], int],
        num_away: Callable[[], int],
    ) -> None:
        """Where the gauges come from."""
        self._hosted_modules.set_function(lambda: len(hosted()))
        self._hosted_bytes.set_function(lambda: sum(one.num_bytes for one in hosted()))
        self._epoch.set_function(epoch)
        self._modules_away.set_function(num_away)

    def ended(self, record: MigrationRecord) -> None:
        """A move is over."""
        self.bytes.labels("kv").inc(record.num_kv_bytes)
        self.bytes.labels("weights").inc(record.num_weight_bytes)
        self.migrations.labels(record.phase.value).inc()
        for phase, seconds in record.phase_seconds.items():
            self.phase_seconds.labels(phase).observe(seconds)
        if record.phase is MigrationPhase.DONE:
            self.pause_seconds.observe(record.pause_seconds)
