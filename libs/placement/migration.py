"""What a migration is named by, and what follows what in it.

    planned ► reserving ► copying ► catching_up ► switching ► releasing ► done
       └──────────┴──────────┴───────────┴────────────┴──► rolling_back ► failed

From `releasing` on the module is where it should be: what breaks then is a lost host, not a failed migration.
"""

from enum import Enum

OWNER_LEFT = "its home left the mesh"
"""How a migration ends, for all others, whose owner is gone: it is carried on by nobody."""


class MigrationPhase(Enum):
    """How far a migration is."""

    PLANNED = "planned"
    RESERVING = "reserving"
    """The destination makes room: KV blocks, weights; under a lease."""
    COPYING = "copying"
    """Weights and KV go over, while the owner serves."""
    CATCHING_UP = "catching_up"
    """What was written meanwhile goes over, round by round, until it is little."""
    SWITCHING = "switching"
    """Between two steps: the last of it, the new layout, the new placement."""
    RELEASING = "releasing"
    """What moved is freed where it was."""
    DONE = "done"
    ROLLING_BACK = "rolling_back"
    FAILED = "failed"


_UNTIL_SWITCHED = {
    MigrationPhase.PLANNED,
    MigrationPhase.RESERVING,
    MigrationPhase.COPYING,
    MigrationPhase.CATCHING_UP,
    MigrationPhase.SWITCHING,
}


def can_abandon(phase: MigrationPhase) -> bool:
    """Whether it can still be rolled back."""
    return phase in _UNTIL_SWITCHED


def is_over(phase: MigrationPhase) -> bool:
    """Whether nothing follows."""
    return phase in (MigrationPhase.DONE, MigrationPhase.FAILED)


_AUTOMATIC, _MANUAL = "auto", "manual"
_MILLISECOND_DIGITS = 12


def new_move_id(unix_seconds: float, suffix: str, *, is_automatic: bool) -> str:
    """`auto-<time>-<suffix>` or `manual-..`: it says who wanted the migration, and ids sort by
    age. Modules at hosts keep the id, so that placements tell what the loop brought there."""
    kind = _AUTOMATIC if is_automatic else _MANUAL
    return f"{kind}-{int(unix_seconds * 1000):0{_MILLISECOND_DIGITS}x}-{suffix}"


def is_automatic(move_id: str) -> bool:
    """Whether the coordinator's loop wanted it."""
    return move_id.startswith(f"{_AUTOMATIC}-")
