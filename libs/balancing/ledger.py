"""What the loop itself brought away, so that it gives back only that.

The name of a move says who wanted it and when, and modules that are away keep that name: so the workers'
placements are the ledger, and a new leader reads the same one.
"""

from collections.abc import Mapping

from libs.balancing.mesh_view import MeshView

AUTOMATIC, MANUAL = "auto", "manual"
_MILLISECOND_DIGITS = 12


def new_move_id(unix_seconds: float, suffix: str, *, is_automatic: bool) -> str:
    """`auto-<time>-<suffix>`; names in order of their age."""
    kind = AUTOMATIC if is_automatic else MANUAL
    return f"{kind}-{int(unix_seconds * 1000):0{_MILLISECOND_DIGITS}x}-{suffix}"


def is_automatic(move_id: str) -> bool:
    """Whether the loop wanted it."""
    return move_id.startswith(f"{AUTOMATIC}-")


def update_ledger(ledger: Mapping[str, float], view: MeshView, now: float) -> dict[str, float]:
    """Since when each module that the loop brought away has been seen there, the oldest first."""
    away = sorted(
        one.move_id for device in view.devices for one in device.placement.placed if is_automatic(one.move_id)
    )
    return {move_id: ledger.get(move_id, now) for move_id in away}
