"""Which blocks a copy of KV still lacks, while steps go on writing."""

from collections.abc import Collection, Iterable, Mapping


class DirtyBlocks:
    """Block ids in the order in which they were written last: those at the front rest longest."""

    def __init__(self, blocks: Iterable[int]) -> None:
        self._blocks: dict[int, None] = dict.fromkeys(blocks)

    def add(self, blocks: Iterable[int]) -> None:
        """They were written (again)."""
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None

    def num_left(self, live: Collection[int]) -> int:
        """How many still have to be copied: what nobody holds any more need not be."""
        return sum(1 for block in self._blocks if block in live)

    def take(self, num_blocks: int, live: Collection[int]) -> list[int]:
        """The next blocks to copy, at most so many, which count as copied from now on."""
        taken: list[int] = []
        for block in list(self._blocks):
            if len(taken) == num_blocks:
                break
            del self._blocks[block]
            if block in live:
                taken.append(block)
        return taken

    def rename(self, moved: Mapping[int, int]) -> None:
        """Blocks got other ids."""
        self._blocks = {moved.get(block, block): None for block in self._blocks}
