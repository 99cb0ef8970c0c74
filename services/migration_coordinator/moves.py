"""All moves that are remembered: those under way, and the last that ended. Pure.

Home workers are the authority: what they tell replaces what was ordered. What no home accounts for ends here.
"""

from collections.abc import Iterable

import msgspec

from libs.balancing.view import UnderWay
from libs.bus.messages.migration import MoveRecord, PlacementTold
from libs.placement.phases import HOME_LEFT, MovePhase, is_over

KNOWN_WITHIN_SECONDS = 3.0
"""A home tells of its moves once a second: what it does not tell of after so long, it never began."""
GRACE_SECONDS = 5.0
"""Beyond a move's deadline, before it is asked to be abandoned."""


class Moves:
    """By id, in order of being heard of."""

    def __init__(self, max_history: int, deadline_seconds: float) -> None:
        self._max_history, self._deadline_seconds = max_history, deadline_seconds
        self._records: dict[str, MoveRecord] = {}
        self._heard_at: dict[str, float] = {}
        """When a move was first heard of; unix seconds by this process's clock."""
        self._abandoned: set[str] = set()

    def get(self, move_id: str) -> MoveRecord | None:
        """One of them."""
        return self._records.get(move_id)

    def newest_first(self) -> tuple[MoveRecord, ...]:
        """All of them, by when they began: of earlier ones a new leader hears in any order."""
        heard_last_first = reversed(self._records.values())
        return tuple(sorted(heard_last_first, key=lambda one: one.started_unix_seconds, reverse=True))

    def under_way(self) -> list[MoveRecord]:
        """Ordered or told of, and not over."""
        return [one for one in self._records.values() if not is_over(one.phase)]

    def as_under_way(self) -> list[UnderWay]:
        """The same, for the loop."""
        return [UnderWay(one.move_id, one.instance, one.host) for one in self.under_way()]

    def ordered(self, record: MoveRecord, now: float) -> None:
        """It is about to be asked for."""
        self._put(record, now)

    def withdraw(self, move_id: str) -> None:
        """It was denied: it never was."""
        self._records.pop(move_id, None)
        self._forget_marks()

    def told(self, record: MoveRecord, now: float) -> None:
        """Its home tells of it. A move that is over stays over; of how it ended the home has the last word,
        also where it was thought to be gone and only its way to the broker was cut."""
        known = self._records.get(record.move_id)
        if known is None or not is_over(known.phase) or is_over(record.phase):
            self._put(record, now)

    def placement_told(self, told: PlacementTold, now: float) -> list[MoveRecord]:
        """A home tells of all its moves; returns those that end because it does not know them."""
        for record in told.moves:
            self.told(record, now)
        known = {record.move_id for record in told.moves}
        lost = [
            one
            for one in self.under_way()
            if one.instance == told.placement.home
            and one.move_id not in known
            and now - self._heard_at[one.move_id] > KNOWN_WITHIN_SECONDS
        ]
        return self._fail(lost, "its home worker does not know it", now)

    def departed(self, worker: str, now: float) -> list[MoveRecord]:
        """Ends the moves of an instance whose worker is gone. A lost host is for the home to find out."""
        lost = [one for one in self.under_way() if one.instance == worker]
        return self._fail(lost, HOME_LEFT, now)

    def take_overdue(self, now: float) -> list[MoveRecord]:
        """Moves to abandon: past their deadline by more than a grace, each told of once."""
        patience = self._deadline_seconds + GRACE_SECONDS
        overdue = [
            one
            for one in self.under_way()
            if one.move_id not in self._abandoned and now - self._heard_at[one.move_id] > patience
        ]
        self._abandoned |= {one.move_id for one in overdue}
        return overdue

    def fail(self, move_id: str, error: str, now: float) -> None:
        """It ends, if it has not ended yet."""
        record = self._records.get(move_id)
        if record is not None and not is_over(record.phase):
            self._fail([record], error, now)

    def _fail(self, records: Iterable[MoveRecord], error: str, now: float) -> list[MoveRecord]:
        failed = [
            msgspec.structs.replace(one, phase=MovePhase.FAILED, error=error, ended_unix_seconds=now)
            for one in records
        ]
        for record in failed:
            self._records[record.move_id] = record
        return failed

    def _put(self, record: MoveRecord, now: float) -> None:
        self._records[record.move_id] = record
        self._heard_at.setdefault(record.move_id, now)
        ended = [one.move_id for one in self._records.values() if is_over(one.phase)]
        for move_id in ended[: max(0, len(self._records) - self._max_history)]:
            del self._records[move_id]
        self._forget_marks()

    def _forget_marks(self) -> None:
        self._heard_at = {key: at for key, at in self._heard_at.items() if key in self._records}
        self._abandoned &= self._records.keys()
