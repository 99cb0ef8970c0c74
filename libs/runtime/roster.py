"""The processes of the mesh, as their presence tells: a pure view, and the loop that feeds it."""

import asyncio
from collections.abc import Callable
from typing import NoReturn

import msgspec
import structlog

from libs.bus.bus import Bus
from libs.bus.message import PresenceEntry
from libs.bus.messages.presence import Presence, ServiceKind, ServiceState

EXPIRY_SECONDS = 3.0
"""Six heartbeats. A peer silent for longer has departed."""

SILENCE_SECONDS = 1.5
"""Three heartbeats. A process that hears nobody for so long, not even itself, learns nothing of the others:
the broker stands still, or it did so itself."""

_LOOK_SECONDS = 0.5
"""How often to look whether the broker is away: its silence must not be held against the peers."""

log = structlog.get_logger()


class RosterChange(msgspec.Struct, frozen=True):
    """The changes by one event. A restarted process departs as one incarnation and arrives as another."""

    arrived: tuple[Presence, ...] = ()
    updated: tuple[Presence, ...] = ()
    """Same incarnation, other state or other facts."""
    departed: tuple[Presence, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.arrived or self.updated or self.departed)


class Roster:
    """Processes of the mesh by incarnation. No clock of its own: `now` is monotonic seconds."""

    def __init__(self, expiry_seconds: float = EXPIRY_SECONDS) -> None:
        self._expiry_seconds = expiry_seconds
        self._present: dict[str, Presence] = {}
        self._heard: dict[str, float] = {}
        self.timeouts_reset_at = float("-inf")
        """When nothing could be heard for the last time; monotonic seconds."""

    def seen(self, presence: Presence, now: float) -> RosterChange:
        """A heartbeat came in."""
        before = self._present.get(presence.incarnation)
        self._present[presence.incarnation] = presence
        self._heard[presence.incarnation] = now
        if before is None:
            return RosterChange(arrived=(presence,))
        return RosterChange(updated=(presence,)) if before != presence else RosterChange()

    def deleted(self, incarnation: str) -> RosterChange:
        """Its presence was deleted, or its end is known otherwise. Unknown incarnations change nothing."""
        self._heard.pop(incarnation, None)
        gone = self._present.pop(incarnation, None)
        return RosterChange(departed=(gone,)) if gone else RosterChange()

    def expire(self, now: float) -> RosterChange:
        """Remove those not heard of for `expiry_seconds`."""
        silent = [i for i, heard in self._heard.items() if now - heard >= self._expiry_seconds]
        return RosterChange(departed=tuple(p for i in silent for p in self.deleted(i).departed))

    def reset_timeouts(self, now: float) -> None:
        """Nothing could be heard until now (the broker was away): all timeouts begin anew."""
        self._heard = dict.fromkeys(self._heard, now)
        self.timeouts_reset_at = now

    def silence_seconds(self, now: float) -> float:
        """Since any heartbeat came in, or the timeouts were reset; 0 while the roster is empty."""
        return now - max(self._heard.values(), default=now)

    def next_expiry(self) -> float | None:
        """When the next timeout runs out; None while the roster is empty."""
        return min(self._heard.values()) + self._expiry_seconds if self._heard else None

    def get(self, incarnation: str) -> Presence | None:
        """By incarnation."""
        return self._present.get(incarnation)

    def all(self) -> list[Presence]:
        """All processes, in order of arrival."""
        return list(self._present.values())

    def of_kind(self, kind: ServiceKind) -> list[Presence]:
        """The processes of a kind, in order of arrival."""
        return [p for p in self._present.values() if p.kind is kind]

    def ready(self, kind: ServiceKind) -> list[Presence]:
        """Those of a kind that take work, in order of arrival."""
        return [p for p in self.of_kind(kind) if p.state is ServiceState.READY]


async def watch_roster(
    bus: Bus, roster: Roster, on_change: Callable[[RosterChange], None], *, hears_itself: bool = False
) -> NoReturn:
    """Feed `roster` from the bus for ever; `on_change` is called on the loop after each real change.

    With `hears_itself` the watching process is present, too: as long as not even its own heartbeats come back
    from the broker, nobody expires.
    """
    loop = asyncio.get_running_loop()

    def tell(change: RosterChange) -> None:
        if change:
            on_change(change)

    async with bus.watch_presence() as entries:
        upcoming = asyncio.ensure_future(anext(entries))
        try:
            while True:
                await asyncio.wait({upcoming}, timeout=_patience(roster, loop.time()))
                is_broker_silent = hears_itself and roster.silence_seconds(loop.time()) >= SILENCE_SECONDS
                if upcoming.done():
                    entry = upcoming.result()
                    upcoming = asyncio.ensure_future(anext(entries))
                    tell(_apply(roster, entry, loop.time()))
                if is_broker_silent or not bus.is_connected:
                    roster.reset_timeouts(loop.time())
                tell(roster.expire(loop.time()))
        finally:
            upcoming.cancel()


def _patience(roster: Roster, now: float) -> float | None:
    expiry = roster.next_expiry()
    return None if expiry is None else max(0.0, min(expiry - now, _LOOK_SECONDS))


def _apply(roster: Roster, entry: PresenceEntry, now: float) -> RosterChange:
    if entry.value is None:
        return roster.deleted(entry.key)
    try:
        return roster.seen(msgspec.msgpack.decode(entry.value, type=Presence), now)
    except msgspec.DecodeError as error:
        log.warning("presence_undecodable", key=entry.key, error=str(error))
        return RosterChange()
