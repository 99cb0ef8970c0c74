"""One prompt on its way through the engine, whichever worker generates its answer."""

import asyncio
from dataclasses import dataclass, field

from libs.request.generation import Generation, num_tokens
from libs.request.outcome import FailureReason
from libs.worker.stores.prefixes import Prefix
from libs.worker.stores.upload_buffer import UploadBuffer


class PromptFailed(Exception):
    """A prompt cannot be run, or its KV not be sent; carries the reason for its gateway."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(slots=True, eq=False)
class Prompt:
    """One attempt at one prompt."""

    generation: Generation
    hands_over: bool = False
    """Its KV goes to another worker, which generates; else the answer is generated here."""
    first_block: int = 0
    """The first block that is handed over; the decode worker has those before."""
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when its last frame was sent, or with its first token where that stays here; carries PromptFailed
    where that will not be."""
    prefix: Prefix | None = None
    """What the KV stores have of it."""
    finding: "asyncio.Task[None] | None" = None
    """Asks them."""
    upload: UploadBuffer | None = None
    """Collects its new blocks for them."""
    is_begun: bool = False
    """The engine counts it in its load."""
    is_computed: bool = False
    """Its first token is known."""
    is_over: bool = False
    """Nobody wants what is still queued of it."""

    @property
    def request_id(self) -> str:
        """Its key everywhere."""
        return self.generation.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, or to find."""
        return num_tokens(self.generation)

    def num_new_tokens(self, block_size: int) -> int:
        """Tokens that no store is known to hold the KV of."""
        if self.prefix is None:
            return self.num_tokens
        num_held = min(self.prefix.found.num_held, self.prefix.num_findable)
        return self.num_tokens - num_held * block_size

    def fail(self, reason: FailureReason, detail: str) -> None:
        """Wake its task with a failure. Only the first call counts."""
        if not self.done.done():
            self.done.set_exception(PromptFailed(reason, detail))
            # Its task may end another way and never look.
            self.done.exception()

    def finish(self) -> None:
        """Its last frame was sent, or its first token is known here."""
        if not self.done.done():
            self.done.set_result(None)

    def restart(self) -> None:
        """It is computed again from what is in the pool."""
        if self.upload is not None:
            self.upload.restart()
