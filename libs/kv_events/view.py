"""Who holds which blocks, in which tier, as told by events: bounded, and quick to ask. Pure.

A name is kept as its first 8 bytes (a collision makes a guess wrong, never a text) with one bit for each
holder and tier. A holder that is gone, or told anew, gets other bits; its old ones are ignored at once and
swept out later, a few names at a time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from libs.bus.messages.kv_events import Cleared, KvEvent, Removed, Stored, Tier
from libs.kv.names import NAME_BYTES

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Where the blocks of one chain are."""

    num_blocks: int
    """Of the chain; nobody holds any from here on, or it ends."""
    by_slot: Ints
    """How many of the first blocks the DEVICE slot of this number holds."""
    store_end: Ints
    """For each position 0..num_blocks: stores hold the blocks from there up to this one, without a gap."""
    disk_before: Ints
    """For each position 0..num_blocks: how many blocks before it stores hold on disk alone."""


class KvView:
    """At most `max_names` names; those told or asked for longest ago are forgotten."""

    def __init__(self, max_names: int) -> None:
        if max_names < 1:
            raise ValueError(f"max_names is {max_names}; it must be at least 1")
        self.num_forgotten_total = 0
        self.num_slot_changes = 0
        """Rises whenever some holder's slot is another one."""
        self._max_names = max_names
        self._masks: OrderedDict[int, int] = OrderedDict()
        self._slots: dict[tuple[str, Tier], int] = {}
        self._live = dict.fromkeys(Tier, 0)
        self._free: list[int] = []
        self._num_slots = 0
        self._dead = self._sweeping = self._num_unswept = 0

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def max_names(self) -> int:
        """More are not known at any time."""
        return self._max_names

    @property
    def holders(self) -> set[str]:
        """Who holds something, or was told to."""
        return {holder for holder, _ in self._slots}

    def apply(self, holder: str, event: KvEvent) -> None:
        """One change, told by its holder."""
        match event:
            case Stored(tier=tier, names=names):
                self._store(1 << self._slot(holder, tier), names)
            case Removed(tier=tier, names=names):
                if (slot := self._slots.get((holder, tier))) is not None:
                    self._remove(1 << slot, names)
            case Cleared(tier=tier):
                self._drop(holder, tier)

    def fill(self, holder: str, stored: Stored) -> None:
        """What was there before anybody listened: it counts as told longest ago, and displaces nothing. So a
        store of millions of blocks that is told anew does not push out what is in use."""
        bit, masks = 1 << self._slot(holder, stored.tier), self._masks
        for key in _keys(stored.names):
            mask = masks.get(key)
            if mask is not None:
                masks[key] = mask | bit
            elif len(masks) < self._max_names:
                masks[key] = bit
                masks.move_to_end(key, last=False)
                self._num_unswept += 1  # the sweep comes from this end
            else:
                self.num_forgotten_total += 1

    def forget(self, holder: str) -> None:
        """This holder is gone."""
        for tier in Tier:
            self._drop(holder, tier)

    def replace(self, holder: str, successor: str) -> None:
        """What is known of `successor` is what `holder` holds; the name `successor` is free again."""
        self.forget(holder)
        for tier in Tier:
            if (slot := self._slots.pop((successor, tier), None)) is not None:
                self._slots[holder, tier] = slot
        self.num_slot_changes += 1

    def sweep(self, max_names: int) -> bool:
        """Go on sweeping out the bits of those who are gone; whether some are left."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._dead = self._dead, 0
            self._num_unswept = len(self._masks)
        self._num_unswept = min(self._num_unswept, len(self._masks))
        for _ in range(min(max_names, self._num_unswept)):
            # Taken from the front and put behind all others: whole rounds leave the order of age as it was.
            key, mask = self._masks.popitem(last=False)
            if rest := mask & ~self._sweeping:
                self._masks[key] = rest
            self._num_unswept -= 1
        if self._num_unswept <= 0:
            self._free += _bits(self._sweeping)
            self._sweeping = 0
        return bool(self._sweeping or self._dead)

    def slots(self, holders: Sequence[str]) -> Ints:
        """The DEVICE slot of each holder; -1: it has none. Good until `num_slot_changes` rises."""
        slots = self._slots
        return np.array([slots.get((holder, Tier.DEVICE), -1) for holder in holders], dtype=np.int64)

    def tiers_of(self, holder: str, name: bytes) -> set[Tier]:
        """Where this holder has this block."""
        mask = self._masks.get(_keys(name)[0], 0)
        return {
            tier
            for tier in Tier
            if (slot := self._slots.get((holder, tier))) is not None and mask >> slot & 1
        }

    def find(self, names: bytes) -> HeldPrefix:
        """Where the blocks with these names are, which are a chain from its start. Found ones stay young."""
        held = self._holders_along(_keys(names))
        memory, disk = self._live[Tier.DRAM], self._live[Tier.DISK]
        in_memory = np.array([mask & memory != 0 for mask in held], dtype=np.bool_)
        on_disk = np.array([mask & disk != 0 for mask in held], dtype=np.bool_)
        disk_before = np.zeros(len(held) + 1, dtype=np.int64)
        np.cumsum(on_disk & ~in_memory, out=disk_before[1:])
        return HeldPrefix(
            num_blocks=len(held),
            by_slot=self._leading(held),
            store_end=_run_ends(in_memory | on_disk),
            disk_before=disk_before,
        )

    def _holders_along(self, keys: list[int]) -> list[int]:
        """Masks of the live holders of each block, up to the first that nobody holds."""
        masks = self._masks
        live = self._live[Tier.DEVICE] | self._live[Tier.DRAM] | self._live[Tier.DISK]
        held: list[int] = []
        for key in keys:
            mask = masks.get(key, 0) & live
            if not mask:
                break
            held.append(mask)
        for key in reversed(keys[: len(held)]):
            masks.move_to_end(key)
        if self._sweeping:  # behind its back from now on, so its work is done here
            masks.update(zip(keys, held, strict=False))
        return held

    def _leading(self, held: list[int]) -> Ints:
        by_slot = np.zeros(self._num_slots, dtype=np.int64)
        num_bytes = (self._num_slots + 7) // 8
        run = self._live[Tier.DEVICE]
        ends: list[int] = []
        dropped: list[bytes] = []
        for position, mask in enumerate([*held, 0]):
            rest = run & mask
            if rest != run:
                ends.append(position)
                dropped.append((run ^ rest).to_bytes(num_bytes, "little"))
                run = rest
        if ends:
            packed = np.frombuffer(b"".join(dropped), dtype=np.uint8).reshape(len(ends), num_bytes)
            rows, slots = np.nonzero(np.unpackbits(packed, axis=1, bitorder="little"))
            by_slot[slots] = np.array(ends, dtype=np.int64)[rows]
        return by_slot

    def _store(self, bit: int, names: bytes) -> None:
        masks = self._masks
        # The last first, so that a chain's beginning, without which the rest is useless, is the youngest.
        for key in reversed(_keys(names)):
            # Out of the sweep's way, so its work is done here.
            masks[key] = masks.pop(key, 0) & ~self._sweeping | bit
        while len(masks) > self._max_names:
            masks.popitem(last=False)
            self.num_forgotten_total += 1

    def _remove(self, bit: int, names: bytes) -> None:
        masks = self._masks
        for key in _keys(names):
            mask = masks.get(key, 0)
            if mask & bit:
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = mask ^ bit

    def _slot(self, holder: str, tier: Tier) -> int:
        slot = self._slots.get((holder, tier))
        if slot is None:
            if not self._free:
                self._free.append(self._num_slots)
                self._num_slots += 1
            slot = self._slots[holder, tier] = self._free.pop()
            self._live[tier] |= 1 << slot
            self.num_slot_changes += 1
        return slot

    def _drop(self, holder: str, tier: Tier) -> None:
        slot = self._slots.pop((holder, tier), None)
        if slot is not None:
            self._live[tier] &= ~(1 << slot)
            self._dead |= 1 << slot
            self.num_slot_changes += 1


def _keys(names: bytes) -> list[int]:
    # What is no whole name, a peer of ours never sent: it is passed over.
    whole = np.frombuffer(names, dtype="<u8", count=len(names) // NAME_BYTES * (NAME_BYTES // 8))
    keys: list[int] = whole[:: NAME_BYTES // 8].tolist()
    return keys


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _run_ends(held: NDArray[np.bool_]) -> Ints:
    """For each position and the end: where the run of held blocks that begins there stops."""
    positions = np.arange(len(held) + 1, dtype=np.int64)
    stops = np.where(np.append(~held, True), positions, len(held))
    return np.minimum.accumulate(stops[::-1])[::-1].astype(np.int64)


NOTHING_HELD = HeldPrefix(
    0, np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
)
"""Of a chain that nobody was asked about."""
