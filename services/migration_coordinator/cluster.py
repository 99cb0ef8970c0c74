"""The workers as this coordinator hears them: presence, load reports, placements. `now` is unix seconds."""

from collections.abc import Iterable

from libs.balancing.view import Device, MeshView, Role, UnderWay, reported_load
from libs.bus.messages.migration import PlacementTold
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.cost.migration import shape_of
from libs.placement.placement import Placed, Placement

WORKERS = (ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER)


class Cluster:
    """What is known of each worker, by incarnation; forgotten with its presence."""

    def __init__(self, stale_after_seconds: float) -> None:
        self._stale_after_seconds = stale_after_seconds
        self._members: dict[str, Presence] = {}
        self._reports: dict[str, tuple[LoadReport, float]] = {}
        self._told: dict[str, PlacementTold] = {}

    def set_members(self, members: Iterable[Presence]) -> None:
        """Everybody who is there now, in order of arrival."""
        self._members = {one.incarnation: one for one in members if one.kind in WORKERS}
        self._reports = {worker: one for worker, one in self._reports.items() if worker in self._members}
        self._told = {worker: one for worker, one in self._told.items() if worker in self._members}

    def hear_load(self, report: LoadReport, now: float) -> None:
        """Late ones are dropped, and those of whom nobody knows."""
        known = self._reports.get(report.incarnation)
        if report.incarnation in self._members and (known is None or known[0].sequence < report.sequence):
            self._reports[report.incarnation] = report, now

    def hear_placement(self, told: PlacementTold) -> None:
        """The home is the authority; a lower epoch is older than what is known."""
        home = told.placement.home
        known = self._told.get(home)
        if home in self._members and (known is None or known.placement.epoch <= told.placement.epoch):
            self._told[home] = told

    def get(self, worker: str) -> Presence | None:
        """By incarnation, in any state."""
        return self._members.get(worker)

    def find(self, who: str) -> Presence | None:
        """A worker by incarnation or name, in any state; of several with a name, the last that came of those
        that are ready, or of all."""
        found = [one for one in self._members.values() if who in (one.incarnation, one.name)]
        found.sort(key=lambda one: (who == one.incarnation, one.state is ServiceState.READY))
        return found[-1] if found else None

    def placement(self, worker: str) -> Placement | None:
        """Of its own instance, as it told."""
        told = self._told.get(worker)
        return told.placement if told else None

    def away(self) -> list[tuple[Presence, Placed]]:
        """Every module that is away from its home, with its home."""
        return [
            (self._members[home], placed)
            for home, told in self._told.items()
            for placed in told.placement.placed
        ]

    def name(self, worker: str) -> str:
        """For people; the incarnation where nobody is there any more."""
        member = self._members.get(worker)
        return member.name if member else worker

    def view(self, under_way: Iterable[UnderWay], now: float) -> MeshView:
        """Ready workers of whom all is known and fresh."""
        devices: list[Device] = []
        for worker, presence in self._members.items():
            report, heard_at = self._reports.get(worker, (None, 0.0))
            told = self._told.get(worker)
            is_usable = presence.state is ServiceState.READY and now - heard_at < self._stale_after_seconds
            if report and told and is_usable and (device := _device(presence, report.load, told)):
                devices.append(device)
        return MeshView(tuple(devices), tuple(under_way))


def role_of(presence: Presence) -> Role:
    """What its instance does."""
    if presence.kind is ServiceKind.PREFILL_WORKER:
        return Role.PREFILL
    return Role.BOTH if presence.runs_prompts else Role.DECODE


def _device(presence: Presence, load: WorkerLoad, told: PlacementTold) -> Device | None:
    shape = shape_of(presence)
    if shape is None:
        return None
    num_blocks = told.num_blocks or load.num_blocks
    reported = reported_load(
        busy_share=load.busy_share,
        hosted_busy_share=load.hosted_busy_share,
        away_share=load.away_share,
        device_share=presence.device_share,
        queued_seconds=load.queued_seconds,
        num_used_blocks=load.num_used_blocks,
        num_blocks=num_blocks,
    )
    return Device(
        worker=presence.incarnation,
        name=presence.name,
        role=role_of(presence),
        fingerprint=presence.model_fingerprint,
        can_host=bool(presence.hosting_address),
        shape=shape,
        placement=told.placement,
        load=reported,
        device_share=presence.device_share,
        hosted_part=min(1.0, load.hosted_busy_share / load.busy_share) if load.busy_share > 0 else 0.0,
        tokens_per_second=load.tokens_per_second,
        num_running=load.num_running,
        memory_bytes=presence.kv_memory_bytes,
        hosted_bytes=load.num_hosted_bytes,
        num_blocks=num_blocks,
        num_used_blocks=load.num_used_blocks,
        num_least_blocks=-(-presence.max_model_len // shape.block_size),
    )
