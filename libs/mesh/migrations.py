"""Migrations that are remembered: those under way, and the last that ended.

Their owners are the authority: what they tell replaces what was ordered. What no owner accounts
for ends here.
"""

from collections.abc import Iterable

import msgspec

from libs.bus.messages.migration import MigrationRecord, StartMigration
from libs.bus.messages.presence import Presence
from libs.placement.migration import OWNER_LEFT, MigrationPhase, is_over
from libs.placement.module import Module

MAX_HISTORY = 200
"""Of those that are over, the oldest are forgotten first."""
KNOWN_WITHIN_SECONDS = 3.0
"""An owner tells of its migrations once a second: what it does not tell of after so long, it never began."""

_RANKS = {phase: rank for rank, phase in enumerate(MigrationPhase)}


class Migrations:
    """By id. `now` is unix seconds."""

    def __init__(self) -> None:
        self._records: dict[str, MigrationRecord] = {}
        self._heard_at: dict[str, float] = {}
        """When each was first heard of."""

    def get(self, move_id: str) -> MigrationRecord | None:
        """One of them."""
        return self._records.get(move_id)

    def heard_at(self, move_id: str) -> float:
        """When one of them was first heard of."""
        return self._heard_at[move_id]

    def newest_first(self) -> list[MigrationRecord]:
        """All of them, by when they began."""
        return sorted(self._records.values(), key=lambda one: one.started_unix_seconds, reverse=True)

    def latest(self, count: int) -> list[MigrationRecord]:
        """Those under way, and as many of the newest as make `count`, the newest first."""
        return [one for at, one in enumerate(self.newest_first()) if at < count or not is_over(one.phase)]

    def under_way(self) -> list[MigrationRecord]:
        """Ordered or told of, and not over."""
        return [one for one in self._records.values() if not is_over(one.phase)]

    def withdraw(self, move_id: str) -> None:
        """It was denied: it never was."""
        self._records.pop(move_id, None)
        self._heard_at.pop(move_id, None)

    def hear(self, record: MigrationRecord, now: float) -> bool:
        """One is so far, or is about to be ordered; says whether that is new. What was told by another way
        may come late: no phase is gone back to. Of how one ended its owner has the last word, also where it
        was thought to have left."""
        known = self._records.get(record.move_id)
        if known == record or (known is not None and _is_late(record, known)):
            return False
        self._records[record.move_id] = record
        self._heard_at.setdefault(record.move_id, now)
        self._forget_old()
        return True

    def hear_owner(self, owner: str, records: Iterable[MigrationRecord], now: float) -> bool:
        """An owner tells of all its migrations; says whether any of it is new. What it should know by now and
        does not, has failed."""
        told = {record.move_id: record for record in records}
        is_new = [self.hear(record, now) for record in told.values()]
        lost = [
            one
            for one in self.under_way()
            if one.instance == owner
            and one.move_id not in told
            and now - self._heard_at[one.move_id] > KNOWN_WITHIN_SECONDS
        ]
        return bool(self._fail(lost, "its home worker does not know it", now)) or any(is_new)

    def owner_departed(self, owner: str, now: float) -> list[MigrationRecord]:
        """Ends the migrations of an instance whose worker is gone; returns them. A lost host is for the owner
        to find out."""
        return self._fail([one for one in self.under_way() if one.instance == owner], OWNER_LEFT, now)

    def fail(self, move_id: str, error: str, now: float) -> None:
        """It ends, if it has not ended yet."""
        record = self._records.get(move_id)
        if record is not None and not is_over(record.phase):
            self._fail([record], error, now)

    def _fail(self, records: list[MigrationRecord], error: str, now: float) -> list[MigrationRecord]:
        failed = [
            msgspec.structs.replace(one, phase=MigrationPhase.FAILED, error=error, ended_unix_seconds=now)
            for one in records
        ]
        self._records |= {one.move_id: one for one in failed}
        return failed

    def _forget_old(self) -> None:
        over = [one for one in self._records.values() if is_over(one.phase)]
        if over and len(self._records) > MAX_HISTORY:
            self.withdraw(min(over, key=lambda one: one.ended_unix_seconds).move_id)


def _is_late(record: MigrationRecord, known: MigrationRecord) -> bool:
    return not is_over(record.phase) and (is_over(known.phase) or _RANKS[record.phase] < _RANKS[known.phase])


def planned(
    order: StartMigration, owner: Presence, module: Module, host: str, host_name: str, now: float
) -> MigrationRecord:
    """How an order stands in the history until its owner tells of it."""
    return MigrationRecord(
        move_id=order.move_id,
        instance=owner.incarnation,
        instance_name=owner.name,
        host=host,
        host_name=host_name,
        module=module,
        is_return=order.module is None,
        returned_move_id=order.returned_move_id,
        with_weights=order.with_weights,
        phase=MigrationPhase.PLANNED,
        expected_epoch=order.expected_epoch,
        epoch=order.expected_epoch,
        reason=order.reason,
        started_unix_seconds=now,
    )
