"""What a move needs of the engine whose module moves: `libs.engine.moving.Moving`."""

from collections.abc import Callable
from typing import Protocol

from libs.engine.hosting.port import Host
from libs.model.model import Model
from libs.placement.placement import Placed, Placement


class CopyProgress(Protocol):
    """After a piece."""

    @property
    def num_left_blocks(self) -> int:
        """To be copied, as of now."""
        ...

    @property
    def num_copied_bytes(self) -> int:
        """By this piece."""
        ...


class Switched(Protocol):
    """After a switch."""

    @property
    def pause_seconds(self) -> float:
        """That no step could run."""
        ...

    @property
    def num_bytes(self) -> int:
        """Copied in all."""
        ...

    @property
    def num_blocks_after(self) -> int:
        """Of the pool."""
        ...


class Home(Protocol):
    """The engine's side of moves. All raise EngineError."""

    @property
    def placement(self) -> Placement:
        """As of the last step."""
        ...

    @property
    def num_total_blocks(self) -> int:
        """Of the pool."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """That nobody holds."""
        ...

    def listen(self, hear: Callable[[Placement, str], None]) -> None:
        """Hear each new placement, and why a host was lost."""
        ...

    async def model_here(self) -> Model:
        """With the weights that are here."""
        ...

    async def capacity_with(self, placed: Placed) -> int:
        """Blocks that the own memory would hold with this module away. Raises BadPlacement, too."""
        ...

    async def begin_move(self, placed: Placed, host: Host, *, model_after: Model | None = None) -> int:
        """Blocks to copy. Raises BadPlacement, too."""
        ...

    async def begin_return(self, move_id: str, *, model_after: Model | None = None) -> int:
        """Blocks to copy. Raises BadPlacement, too."""
        ...

    async def copy_some(self, move_id: str, max_bytes: int) -> CopyProgress:
        """One piece, between two steps, or two layers of a long one."""
        ...

    async def switch(self, move_id: str) -> Switched:
        """The rest, and the new placement. On an error nothing has changed."""
        ...

    async def cancel_move(self, move_id: str) -> None:
        """Forget what was begun; a switch that waits fails. Ignored where there is nothing to cancel."""
        ...

    async def lose_host(self, worker: str, why: str) -> None:
        """Go on without it. Ignored where nothing is there."""
        ...
