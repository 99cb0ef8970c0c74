"""Metrics of moves and of modules that run elsewhere, or here for others."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from libs.bus.messages.migration import Hosted, MoveRecord

_PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PAUSE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class MoveMetrics:
    """Declared once, in the registry of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.phase_seconds = Histogram(
            "kvmesh_migration_phase_seconds",
            "How long a phase of a move of this instance took.",
            ["phase"],
            buckets=_PHASE_BUCKETS,
            registry=registry,
        )
        self.bytes = Counter(
            "kvmesh_migration_bytes_total",
            "What moves of this instance copied: kv or weights.",
            ["what"],
            registry=registry,
        )
        self.pause_seconds = Histogram(
            "kvmesh_migration_pause_seconds",
            "How long a switch kept this instance from its steps.",
            buckets=_PAUSE_BUCKETS,
            registry=registry,
        )
        self.migrations = Counter(
            "kvmesh_migrations_total",
            "Moves of this instance that ended, by outcome: done or failed.",
            ["outcome"],
            registry=registry,
        )
        self.hosts_lost = Counter(
            "kvmesh_hosts_lost_total",
            "Hosts that were lost with modules of this instance.",
            registry=registry,
        )
        self.host_call_seconds = Histogram(
            "kvmesh_host_call_seconds",
            "From a call to a host of modules of this instance to its answer.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self.hosted_call_seconds = Histogram(
            "kvmesh_hosted_step_seconds",
            "From a guest's call, which is layers or an attention of its step, to its result.",
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        self._hosted_modules = Gauge(
            "kvmesh_hosted_modules", "Modules of other instances that run here.", registry=registry
        )
        self._hosted_bytes = Gauge(
            "kvmesh_hosted_bytes", "Memory that modules of other instances take here.", registry=registry
        )
        self._epoch = Gauge(
            "kvmesh_placement_epoch", "How often this instance's placement changed.", registry=registry
        )
        self._modules_away = Gauge(
            "kvmesh_modules_away", "Modules of this instance on other workers.", registry=registry
        )

    def watch(
        self, hosted: Callable[[], tuple[Hosted, ...]], epoch: Callable[[], int], num_away: Callable[[], int]
    ) -> None:
        """Where the gauges come from."""
        self._hosted_modules.set_function(lambda: len(hosted()))
        self._hosted_bytes.set_function(lambda: sum(one.num_bytes for one in hosted()))
        self._epoch.set_function(epoch)
        self._modules_away.set_function(num_away)

    def ended(self, record: MoveRecord) -> None:
        """A move is over."""
        self.bytes.labels("kv").inc(record.num_kv_bytes)
        self.bytes.labels("weights").inc(record.num_weight_bytes)
        self.migrations.labels(record.phase.value).inc()
        for phase, seconds in record.phase_seconds.items():
            self.phase_seconds.labels(phase).observe(seconds)
        if record.num_blocks_after:
            self.pause_seconds.observe(record.pause_seconds)
