"""What KV is where, told as it changes: stored, removed, cleared. The router builds its view from these."""

from enum import Enum
from typing import ClassVar

import msgspec

from libs.bus.message import Message, Request
from libs.bus.messages.presence import ServiceKind


class Tier(Enum):
    """Where a block lies at its holder."""

    DEVICE = "device"
    """In a worker's own pool."""
    DRAM = "dram"
    DISK = "disk"


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """These blocks (16-byte names, joined) are in this tier now."""

    tier: Tier
    names: bytes


class Removed(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """They are not in this tier any more; they may be in another."""

    tier: Tier
    names: bytes


class Cleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Nothing is in this tier any more."""

    tier: Tier


KvEvent = Stored | Removed | Cleared


class KvEvents(Message, frozen=True, kw_only=True, tag="kv_events"):
    """The next events of one publisher. `sequence` is 1 for its first message and rises by 1: whoever misses
    a number asks for a `KvSnapshot`."""

    subject: ClassVar[str] = "kvmesh.kv.events"
    publisher: str
    """Incarnation."""
    kind: ServiceKind
    sequence: int
    events: list[KvEvent]


class KvSnapshotPage(msgspec.Struct, frozen=True, kw_only=True, tag="kv_snapshot_page"):
    """A part of what a publisher holds. Events with a number above `sequence` apply on top, in order."""

    sequence: int
    stored: list[Stored]
    next_page: int = 0
    """0: this was the last page."""


class KvSnapshot(Request[KvSnapshotPage], frozen=True, kw_only=True, tag="kv_snapshot"):
    """What do you hold? Pages are asked for one after the other, the first as 0; blocks that move meanwhile
    are told as events. Who can remember no more than `max_names` says so with the first: of a tier that
    holds more, those are told that were used last."""

    subject: ClassVar[str] = "kvmesh.kv.{to}.snapshot"
    answer: ClassVar[object] = KvSnapshotPage
    page: int = 0
    max_names: int | None = None
    """None: any number."""
