"""What a move does next: decided from how far it is, and from nothing else. Pure."""

import msgspec

from libs.placement.phases import MovePhase, can_abandon

FEW_BLOCKS = 8
"""So little left is copied in the switch itself."""
MAX_ROUNDS = 8
"""A home that writes as fast as it copies is not caught up with; the switch copies what is left."""
_SHRINKS_TO = 0.7
"""Another round is worth it while each leaves at most this share of what the one before left."""

_AFTER = {
    MovePhase.PLANNED: MovePhase.RESERVING,
    MovePhase.RESERVING: MovePhase.COPYING,
    MovePhase.COPYING: MovePhase.CATCHING_UP,
    MovePhase.SWITCHING: MovePhase.RELEASING,
    MovePhase.RELEASING: MovePhase.DONE,
    MovePhase.ROLLING_BACK: MovePhase.FAILED,
}


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a move is, once what its phase asks for was done."""

    phase: MovePhase
    trouble: str = ""
    """Why it cannot go on, if it cannot."""
    num_rounds: int = 0
    """That caught up."""
    num_left_blocks: int = 0
    num_left_before: int = 0
    """Before the last round."""


def next_phase(progress: Progress) -> MovePhase:
    """The phase to enter; the same one for another round."""
    if progress.trouble and can_abandon(progress.phase):
        return MovePhase.ROLLING_BACK
    if progress.phase is MovePhase.CATCHING_UP:
        return MovePhase.SWITCHING if _is_caught_up(progress) else MovePhase.CATCHING_UP
    return _AFTER[progress.phase]


def _is_caught_up(progress: Progress) -> bool:
    is_little = progress.num_left_blocks <= FEW_BLOCKS
    still_shrinks = progress.num_left_blocks <= _SHRINKS_TO * progress.num_left_before
    return is_little or not still_shrinks or progress.num_rounds >= MAX_ROUNDS
