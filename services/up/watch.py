"""Hears from the children through presence: shows progress, says when all are ready, strikes off the dead."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from libs.bus.messages.presence import Presence, ServiceState
from libs.bus.port import Bus, BusError
from libs.runtime.roster import Roster, RosterChange, watch_roster
from services.up.display import Display
from services.up.mesh import Mesh

_MAX_DEATHS_WAITING = 256


class Watch:
    """Presence of the children named, turned into what a person sees."""

    def __init__(self, mesh: Mesh, display: Display, names: Sequence[str]) -> None:
        self._mesh, self._display = mesh, display
        self._states: dict[str, ServiceState | None] = dict.fromkeys(names)
        self._roster = Roster()
        self._deaths: asyncio.Queue[int] = asyncio.Queue(_MAX_DEATHS_WAITING)
        self._begun = asyncio.get_running_loop().time()
        self.all_ready = asyncio.Event()
        """Set once every child has been ready at the same time."""
        mesh.on_death(self._died)

    async def run(self, bus: Bus) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_roster(bus, self._roster, self._changed))
            group.create_task(self._strike_off(bus))

    def _died(self, name: str, pid: int) -> None:
        """A child's process ended; others need not wait until its presence expires."""
        if name in self._states:
            self._states[name] = None
        if not self._deaths.full():
            self._deaths.put_nowait(pid)

    async def _strike_off(self, bus: Bus) -> None:
        while True:
            pid = await self._deaths.get()
            for presence in self._roster.all():
                if presence.pid == pid and presence.name in self._states:
                    with suppress(BusError):  # without a broker it expires by itself
                        await bus.delete_presence(presence.incarnation)

    def _changed(self, change: RosterChange) -> None:
        for presence in (*change.arrived, *change.updated):
            if presence.name in self._states and self._mesh.is_ours(presence.name, presence.pid):
                self._show(presence)

    def _show(self, presence: Presence) -> None:
        name, before = presence.name, self._states[presence.name]
        self._states[name] = presence.state
        if presence.state is ServiceState.STARTING and (presence.detail or before is None):
            self._display.busy(name, presence.detail or "starting")
        elif presence.state is ServiceState.READY and before is not ServiceState.READY:
            self._mesh.became_ready(name)
            self._display.busy(name, "")
            seconds = asyncio.get_running_loop().time() - self._begun
            self._display.line(name, f"ready after {seconds:.1f} s", style="green")
        if all(state is ServiceState.READY for state in self._states.values()):
            self.all_ready.set()
