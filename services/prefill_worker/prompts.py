"""The prompts at a prefill worker, and who is in front of whom. Pure but for the futures that end them."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from libs.bus.messages.generation import Prefill
from libs.request.generation import num_tokens
from libs.request.outcome import FailureReason
from libs.worker.stores.collected_put import CollectedPut
from libs.worker.stores.prefixes import Prefix
from services.prefill_worker.outlet import Outlet


class PromptFailed(Exception):
    """A prompt cannot be handed over; carries the reason for its gateway."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(slots=True, eq=False)
class Prompt:
    """One attempt at one prompt, from its arrival to its hand-over."""

    request: Prefill
    arrived_at: float
    span: Span
    first_block: int = 0
    """The first block that is handed over; the decode worker has those before."""
    handed_over: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the last frame was sent; carries PromptFailed where that will not be."""
    task: "asyncio.Task[None] | None" = None
    outlet: Outlet | None = None
    prefix: Prefix | None = None
    """What the KV stores have of it."""
    finding: "asyncio.Task[None] | None" = None
    """Asks them."""
    put: CollectedPut | None = None
    """Collects its new blocks for them."""
    is_begun: bool = False
    """The engine counts it in its load."""
    is_computed: bool = False
    """Its first token is known."""
    is_over: bool = False
    """Nobody wants what is still queued of it."""
    outcome: str = "aborted"

    @property
    def request_id(self) -> str:
        """Its key everywhere."""
        return self.request.generation.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, or to find."""
        return num_tokens(self.request.generation)

    def num_new_tokens(self, block_size: int) -> int:
        """Tokens that no store is known to hold the KV of."""
        if self.prefix is None:
            return self.num_tokens
        num_held = min(self.prefix.found.num_held, self.prefix.num_findable)
        return self.num_tokens - num_held * block_size

    def fail(self, reason: FailureReason, detail: str) -> None:
        """Wake its task with a failure. Only the first call counts."""
        if not self.handed_over.done():
            self.handed_over.set_exception(PromptFailed(reason, detail))
            # Its task may end another way and never look.
            self.handed_over.exception()

    def finish(self) -> None:
        """Its last frame was sent."""
        if not self.handed_over.done():
            self.handed_over.set_result(None)


class Prompts:
    """By request id, in order of arrival."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self.emptied = asyncio.Event()
        self.emptied.set()

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(list(self._prompts.values()))

    def get(self, request_id: str) -> Prompt | None:
        """None: never heard of, or over."""
        return self._prompts.get(request_id)

    def add(self, prompt: Prompt) -> None:
        """Take one in."""
        self._prompts[prompt.request_id] = prompt
        self.emptied.clear()

    def remove(self, prompt: Prompt) -> None:
        """It is over, whichever way."""
        prompt.is_over = True
        self._prompts.pop(prompt.request_id, None)
        if not self._prompts:
            self.emptied.set()

    def of_gateway(self, gateway: str) -> list[Prompt]:
        """All that a gateway asked for."""
        return [prompt for prompt in self if prompt.request.generation.gateway == gateway]

    def through(self, outlet: Outlet) -> list[Prompt]:
        """All that are handed over through this one."""
        return [prompt for prompt in self if prompt.outlet is outlet]

    def by_decode(self) -> dict[str, list[str]]:
        """Request ids by the decode worker that awaits them."""
        waiting: dict[str, list[str]] = {}
        for prompt in self:
            waiting.setdefault(prompt.request.decode, []).append(prompt.request_id)
        return waiting
