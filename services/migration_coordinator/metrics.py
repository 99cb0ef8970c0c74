"""All metrics of the migration coordinator."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from libs.balancing.view import RoundReport


class CoordinatorMetrics:
    """Declared once, in the registry of the process. Devices and the gap are those the leader sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.is_leader = Gauge(
            "kvmesh_coordinator_is_leader", "1 where this coordinator leads, else 0.", registry=registry
        )
        self.utilization = Gauge(
            "kvmesh_device_utilization",
            "Smoothed shares of each device: compute, memory, queue, and their weighted sum, total.",
            ["worker", "kind"],
            registry=registry,
        )
        self.gap = Gauge(
            "kvmesh_utilization_gap", "Largest less least utilization of the devices.", registry=registry
        )
        self.num_moves = Gauge(
            "kvmesh_coordinator_num_moves", "Moves under way, as far as known here.", registry=registry
        )
        self.decisions = Counter(
            "kvmesh_migration_decisions_total",
            "Rounds of the loop by what came of them: stayed, moved, brought_home, flipped, denied.",
            ["verdict"],
            registry=registry,
        )

    def watch(self, is_leader: Callable[[], bool], num_moves: Callable[[], int]) -> None:
        """What is read when it is scraped."""
        self.is_leader.set_function(is_leader)
        self.num_moves.set_function(num_moves)

    def saw(self, seen: RoundReport) -> None:
        """One round; devices that are gone are told of no more."""
        self.gap.set(seen.gap)
        self.utilization.clear()
        for one in seen.devices:
            kinds = {
                "compute": one.compute,
                "memory": one.memory,
                "queue": one.queue,
                "total": one.utilization,
            }
            for kind, value in kinds.items():
                self.utilization.labels(one.name, kind).set(value)

    def stepped_down(self) -> None:
        """Another coordinator sees them now."""
        self.gap.set(0.0)
        self.utilization.clear()
