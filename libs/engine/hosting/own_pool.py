"""What hosting needs of the engine whose memory it takes from."""

from typing import Protocol


class OwnPool(Protocol):
    """The host's own blocks and those who hold them."""

    def least_blocks(self) -> int:
        """Blocks that the engine cannot spare: those that sequences hold now, and never fewer than one
        sequence of full length takes."""
        ...

    def resize(self, num_blocks: int | None) -> None:
        """Makes the pool `num_blocks`, or as many as its memory holds. Preempts nobody: blocks that are held
        only by name go first.

        Raises:
            NoRoom: sequences hold more.
            NotYet: a step is under way that knows blocks by their ids; nothing was changed.
        """
        ...
