"""Hears from the children through presence: shows progress, says when all are ready, strikes off the dead."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from libs.bus.bus import Bus
from libs.bus.errors import BusError
from libs.bus.messages.presence import Presence, ServiceState
from libs.runtime.roster import Roster, RosterChange, watch_roster
from services.up.display import Display
from services.up.mesh import Mesh

_MAX_DEATHS_WAITING = 256


class Watch:
    """Presence of the children named, turned into what a person sees.

    Who is gone is told by the processes themselves. Silence says nothing here: `up` is not present itself,
    and could not tell a broker that stands still from children that do.
    """

    def __init__(self, children: Mesh, display: Display, names: Sequence[str]) -> None:
        self._children, self._display = children, display
        self._states: dict[str, ServiceState | None] = dict.fromkeys(names)
        self._incarnations: dict[int, str] = {}
        """Of the children that were heard, by process id."""
        self._deaths: asyncio.Queue[int] = asyncio.Queue(_MAX_DEATHS_WAITING)
        self.all_ready = asyncio.Event()
        """Set once every child has been ready at the same time."""
        children.on_death(self._died)

    async def run(self, bus: Bus) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_roster(bus, Roster(), self._changed))
            group.create_task(self._strike_off(bus))

    def _died(self, name: str, pid: int) -> None:
        """A child's process ended; others need not wait until its presence expires."""
        if name in self._states:
            self._states[name] = None
        if not self._deaths.full():
            self._deaths.put_nowait(pid)

    async def _strike_off(self, bus: Bus) -> None:
        while True:
            incarnation = self._incarnations.pop(await self._deaths.get(), None)
            if incarnation is not None:
                with suppress(BusError):  # without a broker it expires by itself
                    await bus.delete_presence(incarnation)

    def _changed(self, change: RosterChange) -> None:
        for presence in (*change.arrived, *change.updated):
            if presence.name in self._states and self._children.is_ours(presence.name, presence.pid):
                self._incarnations[presence.pid] = presence.incarnation
                self._show(presence)

    def _show(self, presence: Presence) -> None:
        name, before = presence.name, self._states[presence.name]
        self._states[name] = presence.state
        if presence.state is ServiceState.STARTING and (presence.detail or before is None):
            self._display.busy(name, presence.detail or "starting")
        elif presence.state is ServiceState.READY and before is not ServiceState.READY:
            self._children.became_ready(name)
            self._display.busy(name, "")
            self._display.line(name, f"ready after {self._children.age_seconds(name):.1f} s", style="green")
        if all(state is ServiceState.READY for state in self._states.values()):
            self.all_ready.set()
