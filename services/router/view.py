"""The cluster as this router hears it: presence, load reports, and own placements no report counts yet.

Pure state. `now` is unix seconds everywhere in this service, because deadlines travel as such.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.kv_events.view import KvView
from libs.mesh.cluster_state import Loads
from libs.mesh.workers import WORKERS
from libs.routing.candidates import Ints
from services.router.instances import Bools, Instances


@dataclass(frozen=True, slots=True)
class Share:
    """What one placement takes at one instance until that instance's reports count it."""

    num_tokens: int = 0
    num_blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Placement:
    """One request that was sent to two instances and is not counted in their reports yet."""

    placed_at: float
    shares: dict[str, Share] = field(default_factory=dict[str, Share])
    """By incarnation; those whose reports count it are taken out."""


class ClusterView:
    """Instances by row. A worker counts as alive while its reports keep coming."""

    def __init__(self, *, stale_after_seconds: float, placement_seconds: float, max_placements: int) -> None:
        self._stale_after_seconds = stale_after_seconds
        self._placement_seconds = placement_seconds
        self._max_placements = max_placements
        self._placements: OrderedDict[str, Placement] = OrderedDict()
        self._loads = Loads()
        self.instances = Instances()
        self._num_changes = 0
        self._slots_seen = (-1, -1)
        self._slots: Ints = np.zeros(0, np.int64)

    def set_members(self, members: Iterable[Presence]) -> None:
        """Take the roster as it is now. Who is not in it is gone, with all that was placed on it."""
        self._num_changes += 1
        present = {member.incarnation: member for member in members if member.kind in WORKERS}
        for incarnation in self.instances.rows.keys() - present.keys():
            self.instances.remove(incarnation)
            self._loads.forget(incarnation)
            for placement in self._placements.values():  # it may come back, and has nothing of them then
                placement.shares.pop(incarnation, None)
        # By name, so that no choice depends on who was heard first.
        for presence in sorted(present.values(), key=lambda p: (p.name, p.incarnation)):
            row = self.instances.rows.get(presence.incarnation)
            if row is None:
                self.instances.add(presence)
            elif self.instances.presences[row] is not presence:
                self.instances.describe(row, presence)

    def hear(self, report: LoadReport, now: float) -> None:
        """Take a load report; an older one than already known, or of a stranger, changes nothing."""
        row = self.instances.rows.get(report.incarnation)
        if row is None or not self._loads.hear(report, now):
            return
        self.instances.hear(row, report.load, now)
        for request_id in report.load.recent_request_ids:
            placement = self._placements.get(request_id)
            if placement is not None:
                self._give_back(placement, report.incarnation)
                if not placement.shares:
                    del self._placements[request_id]

    def place(self, request_id: str, shares: Mapping[str, Share], now: float) -> None:
        """Count a placement until reports do, or until it is withdrawn or forgotten."""
        self.withdraw(request_id)
        while len(self._placements) >= self._max_placements:
            self.withdraw(next(iter(self._placements)))
        self._placements[request_id] = Placement(now, dict(shares))
        for incarnation, share in shares.items():
            self._count(incarnation, share, 1)

    def withdraw(self, request_id: str) -> bool:
        """Forget a placement; False where there is none."""
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return False
        for incarnation in list(placement.shares):
            self._give_back(placement, incarnation)
        return True

    def forget_old_placements(self, now: float) -> None:
        """Placements nobody acted on: their gateway died between the router's answer and the workers."""
        while self._placements:
            request_id, oldest = next(iter(self._placements.items()))
            if oldest.placed_at + self._placement_seconds > now:
                return
            self.withdraw(request_id)

    def next_change(self, now: float) -> float:
        """When time alone will next change the view, at the latest."""
        silences = self.instances.heard_at + self._stale_after_seconds
        coming = silences[silences > now]
        next_at = float(coming.min()) if len(coming) else float("inf")
        oldest = next(iter(self._placements.values()), None)
        if oldest is not None and oldest.placed_at + self._placement_seconds > now:
            next_at = min(next_at, oldest.placed_at + self._placement_seconds)
        return next_at

    def ready(self, kind: ServiceKind, now: float) -> Ints:
        """Rows of the instances of a kind that take requests."""
        of_kind = (
            self.instances.is_prefill if kind is ServiceKind.PREFILL_WORKER else self.instances.is_decode
        )
        return np.flatnonzero(of_kind & self._alive(now))

    def kv_slots(self, held: KvView) -> Ints:
        """For each row, the slot that `held` has for that worker's pool; -1: it knows of none."""
        seen = (held.num_slot_changes, self._num_changes)
        if seen != self._slots_seen:
            incarnations = [p.incarnation if p is not None else "" for p in self.instances.presences]
            self._slots, self._slots_seen = held.slots(incarnations), seen
        return self._slots

    def has_pair(self, now: float) -> bool:
        """Whether some prompt can be run, and its answer decoded."""
        alive, known = self._alive(now), self.instances
        decodes = known.is_decode & alive
        if (decodes & known.runs_prompts).any():
            return True
        prefills = known.fingerprint[known.is_prefill & alive]
        return bool(len(prefills)) and bool(np.isin(known.fingerprint[decodes], prefills).any())

    def has_starting(self) -> bool:
        """Whether some worker is on its way to ready."""
        members = (presence for presence in self.instances.presences if presence is not None)
        return any(presence.state is ServiceState.STARTING for presence in members)

    def num_placements(self) -> int:
        """For the gauge that must return to its baseline."""
        return len(self._placements)

    def _alive(self, now: float) -> Bools:
        known = self.instances
        alive: Bools = known.is_ready & (now < known.heard_at + self._stale_after_seconds)
        return alive

    def _give_back(self, placement: Placement, incarnation: str) -> None:
        share = placement.shares.pop(incarnation, None)
        if share is not None:
            self._count(incarnation, share, -1)

    def _count(self, incarnation: str, share: Share, sign: int) -> None:
        row = self.instances.rows.get(incarnation)
        if row is None:
            return
        known = self.instances
        known.num_pending[row] += sign
        known.num_pending_tokens[row] += sign * share.num_tokens
        known.num_pending_blocks[row] += sign * share.num_blocks
        known.pending_seconds[row] += sign * share.seconds
        if not known.num_pending[row]:
            known.pending_seconds[row] = 0.0  # what sums of floats leave behind
