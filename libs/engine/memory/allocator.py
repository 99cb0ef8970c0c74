"""Which blocks are whose: reference counts, and the local prefix cache by block name.

A block is held (referenced), cached (held by nobody, but its name still finds it) or free. Cached blocks
count as free: they are evicted, least recently released first, when free ones run out.
"""

from collections.abc import Iterable, Mapping, Sequence

from libs.engine.errors import OutOfBlocks


class BlockAllocator:
    """Bookkeeping over block ids 0 .. num_blocks - 1; no memory, no I/O."""

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of release, oldest first
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._changed: dict[bytes, bool] = {}  # since they were taken: whether it can be found now

    @property
    def num_blocks(self) -> int:
        """All blocks."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed."""
        return num_blocks <= self.num_free

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks, one reference each, unnamed. Raises OutOfBlocks, and takes none, when too few."""
        if not self.can_allocate(num_blocks):
            raise OutOfBlocks(f"{num_blocks} blocks asked for, {self.num_free} are free")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block in taken:
            self._references[block] = 1
        return taken

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `names` that is here; acquire them before the next `allocate`."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached(self, blocks: Iterable[int]) -> int:
        """How many of these are held by nobody: acquiring them lowers `num_free` by as many."""
        return sum(1 for block in blocks if not self._references[block])

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each; blocks must be held or cached."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Tails are evicted before heads, which more sequences share."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def num_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of these would be free after one release each."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def name(self, block: int, name: bytes) -> None:
        """Makes a held block findable. A block keeps its first name, a name its first block."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name
            self._note(name, can_be_found=True)

    def names(self) -> list[bytes]:
        """All names that find a block."""
        return list(self._block_of)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Names that find a block and did not, and the reverse, since this was last asked."""
        stored = [name for name, can_be_found in self._changed.items() if can_be_found]
        removed = [name for name, can_be_found in self._changed.items() if not can_be_found]
        self._changed.clear()
        return stored, removed

    def live(self) -> set[int]:
        """Blocks whose content matters: held or cached."""
        return self.held() | set(self._cached)

    def held(self) -> set[int]:
        """Blocks that somebody holds."""
        return {block for block, count in enumerate(self._references) if count}

    def forget_cached(self, *, keep: int = 0) -> None:
        """Frees blocks that are held by name only, but for the `keep` that were released last."""
        while len(self._cached) > keep:
            self._free.append(self._evict())

    def resize(self, num_blocks: int, moved: Mapping[int, int]) -> None:
        """Follows a change of the pool's layout; `moved` maps old to new ids of live blocks."""
        references = [0] * num_blocks
        for block in self.live():
            references[moved.get(block, block)] = self._references[block]
        self._cached = {moved.get(block, block): None for block in self._cached}
        self._name_of = {moved.get(block, block): name for block, name in self._name_of.items()}
        self._block_of = {name: block for block, name in self._name_of.items()}
        self._references = references
        live = self.live()
        self._free = [block for block in range(num_blocks - 1, -1, -1) if block not in live]

    def _evict(self) -> int:
        """Takes the block that was released first out of the cache."""
        block = next(iter(self._cached))
        del self._cached[block]
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._note(name, can_be_found=False)
        return block

    def _note(self, name: bytes, *, can_be_found: bool) -> None:
        if self._changed.get(name) is (not can_be_found):
            del self._changed[name]  # as it was: nobody needs to hear of it
        else:
            self._changed[name] = can_be_found
