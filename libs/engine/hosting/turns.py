"""Whose turn it is: the engine's own steps and each guest get equal shares of the device, layer by layer.

Start-time fair queueing over measured busy seconds. Each party has a virtual time, which its busy seconds
push on; the least goes first. One that comes back after a pause is lifted to the time of whoever ran last: so
nobody saves up turns while it has nothing to do, and who has waits no longer than the others' pieces take.
"""

from collections.abc import Iterable

OWN = ""
"""The name of the own steps."""


class Turns:
    """Plain state; no clock."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._ready: frozenset[str] = frozenset()
        self._now = 0.0
        """Virtual time of the last that was chosen."""

    def next(self, ready: Iterable[str]) -> str:
        """Who is to run now, of all that have something to run; a guest before own steps when equal.

        Own steps are many, a guest's call is one that somebody waits for.
        """
        names = frozenset(ready)
        if names != self._ready:
            self._note_ready(names)
        chosen = min(names, key=lambda name: (self._seconds[name], name == OWN, name))
        self._now = max(self._now, self._seconds[chosen])
        return chosen

    def charge(self, name: str, seconds: float) -> None:
        """It was busy for so long."""
        self._seconds[name] = self._seconds.get(name, self._now) + seconds

    def _note_ready(self, names: frozenset[str]) -> None:
        for name in names - self._ready:
            self._seconds[name] = max(self._seconds.get(name, 0.0), self._now)
        self._ready = names
        # Of others only those that are ahead matter: the rest would be lifted when they come back, if ever.
        self._seconds = {
            name: seconds for name, seconds in self._seconds.items() if name in names or seconds > self._now
        }
