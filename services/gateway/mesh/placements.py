"""What the workers told of placements and moves, the newest of each. Pure."""

from dataclasses import dataclass

from msgspec.structs import replace

from libs.bus.messages.migration import MoveRecord, PlacementTold
from libs.placement.phases import HOME_LEFT, MovePhase, is_over

MAX_MOVES = 64
"""Moves that are remembered; of those that are over, the oldest are forgotten first."""

_RANKS = {phase: rank for rank, phase in enumerate(MovePhase)}


@dataclass(frozen=True, slots=True)
class HeardPlacement:
    """What a worker told last, and when it came (monotonic seconds)."""

    told: PlacementTold
    heard: float


def _what_stays(told: PlacementTold) -> tuple[object, ...]:
    return told.placement, told.num_blocks, told.hosted


class Placements:
    """By the incarnation of the home. `hear` and `hear_move` say whether anything is new."""

    def __init__(self) -> None:
        self._heard: dict[str, HeardPlacement] = {}
        self._moves: dict[str, MoveRecord] = {}

    def hear(self, told: PlacementTold, now: float) -> bool:
        """A worker told its placement, its guests and its moves."""
        home = told.placement.home
        known = self._heard.get(home)
        self._heard[home] = HeardPlacement(told, now)
        changed = [self.hear_move(move) for move in told.moves]
        is_same = known is not None and _what_stays(known.told) == _what_stays(told)
        return any(changed) or not is_same

    def hear_move(self, move: MoveRecord) -> bool:
        """A move is so far. What was told by another way may come late: no phase is gone back to. Of how it
        ended its home has the last word, also where it was thought to have left."""
        known = self._moves.get(move.move_id)
        is_late = known is not None and _RANKS[move.phase] < _RANKS[known.phase] and not is_over(move.phase)
        if known == move or is_late:
            return False
        self._moves[move.move_id] = move
        self._forget_old_moves()
        return True

    def forget(self, home: str, now_unix: float) -> None:
        """The worker left; what it was moving is moved by nobody."""
        self._heard.pop(home, None)
        for move in [m for m in self._moves.values() if m.instance == home and not is_over(m.phase)]:
            self._moves[move.move_id] = replace(
                move, phase=MovePhase.FAILED, error=HOME_LEFT, ended_unix_seconds=now_unix
            )

    def get(self, home: str) -> HeardPlacement | None:
        """What a worker told last."""
        return self._heard.get(home)

    def moves(self) -> list[MoveRecord]:
        """Those under way and those that ended last, the newest first."""
        return sorted(self._moves.values(), key=lambda move: move.started_unix_seconds, reverse=True)

    def latest(self, num: int) -> list[MoveRecord]:
        """Those under way, and as many of the newest as make `num`, the newest first."""
        moves = self.moves()
        return [move for at, move in enumerate(moves) if at < num or not is_over(move.phase)]

    def _forget_old_moves(self) -> None:
        if len(self._moves) <= MAX_MOVES:
            return
        over = [move for move in self._moves.values() if is_over(move.phase)]
        if over:
            oldest = min(over, key=lambda move: move.ended_unix_seconds)
            del self._moves[oldest.move_id]
