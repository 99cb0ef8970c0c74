"""The cluster as this router hears it: presence, load reports, and own placements no report counts yet.

Pure state. `now` is unix seconds everywhere in this service, because deadlines travel as such.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from libs.bus.messages.generation import Placed
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState, WorkerLoad

WORKERS = (ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER)


@dataclass(frozen=True, slots=True)
class Placement:
    """One request that was sent to two instances and is not yet counted in both their reports."""

    request_id: str
    prefill: str
    decode: str
    num_tokens: int
    placed_at: float


@dataclass(slots=True)
class Instance:
    """One worker: what it said of itself, and what was placed on it since."""

    presence: Presence
    load: WorkerLoad | None = None
    sequence: int = -1
    heard_at: float = float("-inf")
    pending: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of placements its reports do not count yet, by request id."""

    @property
    def incarnation(self) -> str:
        """The name that messages are addressed to."""
        return self.presence.incarnation

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return max(1, self.load.block_size) if self.load else 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
        return self.load.num_blocks if self.load else 0

    @property
    def num_sequences(self) -> int:
        """Sequences it has or is about to have."""
        load = self.load or WorkerLoad()
        return load.num_running + load.num_waiting + load.num_reserved + len(self.pending)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens in front of a new prompt."""
        return (self.load.num_waiting_tokens if self.load else 0) + sum(self.pending.values())

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds, no placement on its way will take, and no running sequence needs next."""
        load = self.load or WorkerLoad()
        taken = sum(blocks_for(tokens, self.block_size) for tokens in self.pending.values())
        return self.num_blocks - load.num_used_blocks - taken - load.num_running - load.num_waiting


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that a prompt of `num_tokens` and its first output token take."""
    return num_tokens // block_size + 1


class ClusterView:
    """Instances by incarnation. A worker counts as alive while its reports keep coming."""

    def __init__(self, *, stale_after_seconds: float, placement_seconds: float, max_placements: int) -> None:
        self._stale_after_seconds = stale_after_seconds
        self._placement_seconds = placement_seconds
        self._max_placements = max_placements
        self._instances: dict[str, Instance] = {}
        self._placements: OrderedDict[str, Placement] = OrderedDict()

    def set_members(self, members: Iterable[Presence]) -> None:
        """Take the roster as it is now. Who is not in it is gone, with all that was placed on it."""
        present = {member.incarnation: member for member in members if member.kind in WORKERS}
        for incarnation in self._instances.keys() - present.keys():
            del self._instances[incarnation]
        for incarnation, presence in present.items():
            if incarnation in self._instances:
                self._instances[incarnation].presence = presence
            else:
                self._instances[incarnation] = Instance(presence)

    def hear(self, report: LoadReport, now: float) -> None:
        """Take a load report; an older one than already known, or of a stranger, changes nothing."""
        instance = self._instances.get(report.incarnation)
        if instance is None or report.sequence <= instance.sequence:
            return
        instance.load, instance.sequence, instance.heard_at = report.load, report.sequence, now
        for request_id in report.load.recent_request_ids:
            instance.pending.pop(request_id, None)

    def place(self, request_id: str, pair: Placed, num_tokens: int, now: float) -> None:
        """Count a placement until reports do, or until it is withdrawn or forgotten."""
        self.withdraw(request_id)
        while len(self._placements) >= self._max_placements:
            self.withdraw(next(iter(self._placements)))
        self._placements[request_id] = Placement(request_id, pair.prefill, pair.decode, num_tokens, now)
        for incarnation in (pair.prefill, pair.decode):
            if incarnation in self._instances:
                self._instances[incarnation].pending[request_id] = num_tokens

    def withdraw(self, request_id: str) -> bool:
        """Forget a placement; False where there is none."""
        placement = self._placements.pop(request_id, None)
        if placement is None:
            return False
        for incarnation in (placement.prefill, placement.decode):
            if incarnation in self._instances:
                self._instances[incarnation].pending.pop(request_id, None)
        return True

    def forget_old_placements(self, now: float) -> None:
        """Placements nobody acted on: their gateway died between the router's answer and the workers."""
        while self._placements:
            oldest = next(iter(self._placements.values()))
            if oldest.placed_at + self._placement_seconds > now:
                return
            self.withdraw(oldest.request_id)

    def next_change(self, now: float) -> float:
        """When time alone will next change the view, at the latest."""
        silences = [i.heard_at + self._stale_after_seconds for i in self._instances.values() if i.load]
        oldest = next(iter(self._placements.values()), None)
        if oldest:
            silences.append(oldest.placed_at + self._placement_seconds)
        return min((at for at in silences if at > now), default=float("inf"))

    def ready(self, kind: ServiceKind, now: float) -> list[Instance]:
        """Instances of a kind that take requests, by name, so that no choice depends on hash order."""
        alive = (i for i in self._instances.values() if i.presence.kind is kind and i.load is not None)
        return sorted(
            (
                i
                for i in alive
                if i.presence.state is ServiceState.READY and now < i.heard_at + self._stale_after_seconds
            ),
            key=lambda i: (i.presence.name, i.incarnation),
        )

    def has_starting(self) -> bool:
        """Whether some worker is on its way to ready."""
        return any(i.presence.state is ServiceState.STARTING for i in self._instances.values())

    def num_placements(self) -> int:
        """For the gauge that must return to its baseline."""
        return len(self._placements)
