"""The newest load and placement of each worker that is there, and the migrations between them.

`now` is unix seconds, told by whoever calls.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from libs.bus.messages.migration import MigrationRecord, PlacementUpdate
from libs.bus.messages.presence import LoadReport, Presence
from libs.mesh.migrations import Migrations
from libs.placement.migration import is_over
from libs.placement.placement import PlacedModule
from libs.runtime.roster import Roster, RosterChange

Update = TypeVar("Update", LoadReport, PlacementUpdate)


@dataclass(frozen=True, slots=True)
class Heard(Generic[Update]):
    """The newest message of its kind from one worker, and when it came."""

    message: Update
    at: float


class Loads:
    """The newest load report of each process; reports may come in any order."""

    def __init__(self) -> None:
        self._heard: dict[str, Heard[LoadReport]] = {}

    def hear(self, report: LoadReport, now: float) -> bool:
        """Keep it unless a newer one is known; says whether it was kept."""
        known = self._heard.get(report.incarnation)
        if known is not None and report.sequence <= known.message.sequence:
            return False
        self._heard[report.incarnation] = Heard(report, now)
        return True

    def forget(self, incarnation: str) -> None:
        """It left."""
        self._heard.pop(incarnation, None)

    def get(self, incarnation: str) -> Heard[LoadReport] | None:
        """The newest of one process."""
        return self._heard.get(incarnation)


class ClusterState:
    """What is heard of the processes in `roster`. Feed it from the bus; it is forgotten with them."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.loads = Loads()
        self.migrations = Migrations()
        self._placements: dict[str, Heard[PlacementUpdate]] = {}

    def hear_load(self, report: LoadReport, now: float) -> None:
        """A process reports its load."""
        if self.roster.get(report.incarnation) is not None:
            self.loads.hear(report, now)

    def hear_placement(self, update: PlacementUpdate, now: float) -> bool:
        """A worker publishes its placement, the modules that it hosts and its migrations; says whether any of
        it is new. It is the authority; a lower epoch is older than what is known."""
        owner = update.placement.owner
        known = self._placements.get(owner)
        is_late = known is not None and update.placement.epoch < known.message.placement.epoch
        if self.roster.get(owner) is None or is_late:
            return False
        self._placements[owner] = Heard(update, now)
        are_migrations_new = self.migrations.hear_owner(owner, update.moves, now)
        return are_migrations_new or known is None or _what_stays(known.message) != _what_stays(update)

    def hear_migration(self, record: MigrationRecord, now: float) -> bool:
        """Its owner tells how far a migration is; says whether that is new. Of an owner that is not here only
        how a migration ended is kept: nobody would end what it was moving."""
        is_here = self.roster.get(record.instance) is not None
        return (is_here or is_over(record.phase)) and self.migrations.hear(record, now)

    def roster_changed(self, change: RosterChange, now: float) -> list[MigrationRecord]:
        """Forget who departed; returns the migrations that failed by it."""
        failed: list[MigrationRecord] = []
        for presence in change.departed:
            self.loads.forget(presence.incarnation)
            self._placements.pop(presence.incarnation, None)
            failed += self.migrations.owner_departed(presence.incarnation, now)
        return failed

    def placement(self, worker: str) -> Heard[PlacementUpdate] | None:
        """The newest of a worker's own instance."""
        return self._placements.get(worker)

    def modules_away(self) -> list[tuple[Presence, PlacedModule]]:
        """Every module that is at a host, with its owner; by the owners' names."""
        return [
            (owner, placed)
            for owner in sorted(self.roster.all(), key=lambda one: one.name)
            if (heard := self._placements.get(owner.incarnation)) is not None
            for placed in heard.message.placement.placed
        ]

    def name(self, worker: str) -> str:
        """For people; the incarnation where nobody is there any more."""
        presence = self.roster.get(worker)
        return presence.name if presence is not None else worker


def _what_stays(update: PlacementUpdate) -> tuple[object, ...]:
    return update.placement, update.num_blocks, update.hosted
