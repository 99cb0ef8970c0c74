"""Who is to run: restarts with back-off, and the order of the end. Pure: time in, decisions out."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
STABLE_SECONDS = 30.0
"""A child that ran this long had a good start; its next death counts as the first again."""

EXIT_BAD_SETTINGS = 2


class Phase(Enum):
    """What is to become of a child."""

    DUE = "due"
    """To be started at `due_at`."""
    RUNNING = "running"
    ENDING = "ending"
    """Asked to end."""
    ENDED = "ended"
    """Will not run again."""


@dataclass
class _Child:
    stage: int
    phase: Phase = Phase.DUE
    due_at: float = 0.0
    started_at: float = 0.0
    num_failures: int = 0
    was_ready: bool = False


@dataclass(frozen=True)
class Death:
    """What follows from a child's end: a restart after a delay, or nothing, or the end of everything."""

    restarts_in_seconds: float | None
    is_fatal: bool = False


def backoff_seconds(num_failures: int) -> float:
    """Doubling from half a second up to half a minute; `num_failures` counts from 1."""
    return float(min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** min(num_failures - 1, 16)))


class Supervision:
    """The phases of all children. Ask `due`, `to_end`; tell `started`, `ready`, `died`, `stop`."""

    def __init__(self, stages: Mapping[str, int], stable_seconds: float = STABLE_SECONDS) -> None:
        self._stable_seconds = stable_seconds
        self._children = {name: _Child(stage) for name, stage in stages.items()}
        self._is_stopping = False

    def due(self, now: float) -> list[str]:
        """Children to start now."""
        return [n for n, c in self._children.items() if c.phase is Phase.DUE and c.due_at <= now]

    def next_due(self) -> float | None:
        """When `due` will next name somebody."""
        return min((c.due_at for c in self._children.values() if c.phase is Phase.DUE), default=None)

    def started(self, name: str, now: float) -> None:
        """It runs."""
        child = self._children[name]
        child.phase, child.started_at = Phase.RUNNING, now

    def ready(self, name: str) -> None:
        """It serves: whatever its settings are, they work."""
        self._children[name].was_ready = True

    def died(self, name: str, exit_code: int, now: float) -> Death:
        """It ended, by itself or asked. Bad settings at the first start are fatal: no restart can help."""
        child = self._children[name]
        if self._is_stopping or child.phase is Phase.ENDING:
            child.phase = Phase.ENDED
            return Death(None)
        if exit_code == EXIT_BAD_SETTINGS and not child.was_ready:
            child.phase = Phase.ENDED
            return Death(None, is_fatal=True)
        is_stable = now - child.started_at >= self._stable_seconds
        child.num_failures = 1 if is_stable else child.num_failures + 1
        delay = backoff_seconds(child.num_failures)
        child.phase, child.due_at = Phase.DUE, now + delay
        return Death(delay)

    def stop(self) -> None:
        """Nobody is started any more; `to_end` names who is to go, stage by stage. Idempotent."""
        self._is_stopping = True
        for child in self._children.values():
            if child.phase is Phase.DUE:
                child.phase = Phase.ENDED

    def to_end(self) -> list[str]:
        """Children to ask to end now: those of the first stage that still runs."""
        if not self._is_stopping:
            return []
        alive = {n: c for n, c in self._children.items() if c.phase in (Phase.RUNNING, Phase.ENDING)}
        stage = min((c.stage for c in alive.values()), default=0)
        return [n for n, c in alive.items() if c.stage == stage and c.phase is Phase.RUNNING]

    def ending(self, name: str) -> None:
        """It was asked to end."""
        self._children[name].phase = Phase.ENDING

    def alive(self) -> list[str]:
        """Children that have a process."""
        return [n for n, c in self._children.items() if c.phase in (Phase.RUNNING, Phase.ENDING)]

    @property
    def is_over(self) -> bool:
        """Nobody runs and nobody will."""
        return all(c.phase is Phase.ENDED for c in self._children.values())
