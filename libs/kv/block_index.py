"""Which blocks a store holds, and which must go for new ones: LRU under a budget of bytes. Pure.

A block is *staged* from the start of its put until all its layers are there; only then it is *held* and can
be found. Pins keep blocks: for a time (somebody was told that they are here) or while they are being read.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class HeldBlock:
    """One block that can be found."""

    size_bytes: int
    pinned_until: float = 0.0
    num_readers: int = 0

    def is_pinned(self, now: float) -> bool:
        """Whether somebody counts on it."""
        return self.num_readers > 0 or now < self.pinned_until


@dataclass(frozen=True, slots=True)
class Staging:
    """The answer to a put: the blocks to take in, and the blocks that made room for them."""

    names: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class BlockIndex:
    """Names of held and staged blocks, the least recently used first."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.num_used_bytes = 0
        """Held and staged."""
        self._held: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._staged: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    @property
    def num_staged(self) -> int:
        """Blocks whose layers are on their way."""
        return len(self._staged)

    def longest_prefix(self, names: Sequence[bytes]) -> int:
        """How many of the first names are held."""
        return next((n for n, name in enumerate(names) if name not in self._held), len(names))

    def use(self, names: Sequence[bytes], *, pinned_until: float = 0.0) -> None:
        """Mark held blocks as used just now. A chain's first block counts as the latest: without it the
        others cannot be found, so they must go before it."""
        for name in reversed(names):
            block = self._held[name]
            block.pinned_until = max(block.pinned_until, pinned_until)
            self._held.move_to_end(name)

    def begin_reading(self, names: Sequence[bytes]) -> bool:
        """Keep these until `end_reading`; False, and nothing is kept, where one is missing."""
        if self.longest_prefix(names) < len(names):
            return False
        for name in names:
            self._held[name].num_readers += 1
        self.use(names)
        return True

    def end_reading(self, names: Sequence[bytes]) -> None:
        """The inverse of `begin_reading`."""
        for name in names:
            self._held[name].num_readers -= 1

    def stage(self, names: Sequence[bytes], block_bytes: int, now: float) -> Staging | None:
        """Make room for those of `names` neither held nor staged. None: pinned blocks leave no room."""
        fresh = tuple(dict.fromkeys(n for n in names if n not in self._held and n not in self._staged))
        known = [name for name in names if name in self._held]
        victims = self._victims(
            self.num_used_bytes + len(fresh) * block_bytes - self.budget_bytes, set(known), now
        )
        if victims is None:
            return None
        for name in victims:
            self.num_used_bytes -= self._held.pop(name).size_bytes
        for name in fresh:
            self._staged[name] = block_bytes
        self.num_used_bytes += len(fresh) * block_bytes
        self.use(known)
        return Staging(fresh, tuple(victims))

    def commit(self, names: Sequence[bytes]) -> None:
        """All layers of these staged blocks are there: they are held from now on."""
        for name in reversed(names):
            self._held[name] = HeldBlock(self._staged.pop(name))

    def discard(self, names: Sequence[bytes]) -> None:
        """These staged blocks will not be completed."""
        for name in names:
            self.num_used_bytes -= self._staged.pop(name)

    def _victims(self, num_bytes: int, spared: set[bytes], now: float) -> list[bytes] | None:
        """Least recently used blocks of at least `num_bytes`; None where too few may go."""
        victims: list[bytes] = []
        for name, block in self._held.items():
            if num_bytes <= 0:
                break
            if name not in spared and not block.is_pinned(now):
                victims.append(name)
                num_bytes -= block.size_bytes
        return victims if num_bytes <= 0 else None
