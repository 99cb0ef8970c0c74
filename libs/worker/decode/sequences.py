"""The sequences that generate here, and which of them nobody will come for any more. Pure.

`now` is unix seconds, because deadlines travel as such.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from opentelemetry.trace import Span

from libs.request.generation import Generation, num_tokens
from libs.request.outcome import FailureReason
from libs.worker.decode.received_blocks import ReceivedBlocks
from libs.worker.prefill.prompt import Prompt


class Stage(Enum):
    """What a sequence is waiting for."""

    RESERVING = auto()
    """The engine's answer."""
    AWAITING_KV = auto()
    """Its prefill worker."""
    RUNNING = auto()
    """Its turn in each step."""


@dataclass(slots=True)
class HeldSequence:
    """One attempt at one sequence. `prefill` is empty where its prompt runs here."""

    generation: Generation
    prefill: str
    lease_ends_at: float
    span: Span
    stage: Stage = Stage.RESERVING
    received: ReceivedBlocks | None = None
    first_blocks_at: float | None = None
    output_ids: list[int] = field(default_factory=list[int])
    """Tokens that this attempt made."""
    writes: "set[asyncio.Task[None]]" = field(default_factory=set["asyncio.Task[None]"])
    """Its KV on the way into the pool."""
    prompt: Prompt | None = None
    """Its prompt, where that runs here."""
    running: "asyncio.Task[None] | None" = None
    """Runs it, until nothing of its KV is on its way any more."""

    @property
    def request_id(self) -> str:
        """Its key everywhere."""
        return self.generation.request_id

    @property
    def first_index(self) -> int:
        """Output index of the first token that this attempt makes."""
        return num_tokens(self.generation) - self.generation.num_prompt_tokens

    @property
    def ends_at(self) -> float:
        """When nobody will wait for it any more."""
        deadline = self.generation.deadline_unix_seconds
        return deadline if self.stage is Stage.RUNNING else min(deadline, self.lease_ends_at)


class Sequences:
    """By request id."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._held: dict[str, HeldSequence] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[HeldSequence]:
        return iter(list(self._held.values()))

    def get(self, request_id: str) -> HeldSequence | None:
        """None: never heard of, or over."""
        return self._held.get(request_id)

    def hold(self, generation: Generation, prefill: str, span: Span, now: float) -> HeldSequence:
        """Take one in."""
        held = HeldSequence(generation, prefill, now + self._lease_seconds, span)
        self._held[generation.request_id] = held
        return held

    def remove(self, request_id: str) -> HeldSequence | None:
        """It is over."""
        return self._held.pop(request_id, None)

    def renew(self, held: HeldSequence, now: float) -> None:
        """Its prefill worker was heard."""
        held.lease_ends_at = now + self._lease_seconds

    def num_in(self, stage: Stage) -> int:
        """How many are in this stage."""
        return sum(1 for held in self._held.values() if held.stage is stage)

    def of_gateway(self, gateway: str) -> list[HeldSequence]:
        """All that a gateway asked for."""
        return [held for held in self if held.generation.gateway == gateway]

    def awaiting(self, prefill: str) -> list[HeldSequence]:
        """Those whose KV is to come from this prefill worker."""
        return [held for held in self if held.prefill == prefill and held.stage is Stage.AWAITING_KV]

    def expired(self, now: float) -> list[tuple[HeldSequence, FailureReason]]:
        """Those past their lease or deadline. One that the engine has yet to answer for is left to it."""
        return [
            (
                held,
                FailureReason.DEADLINE
                if held.generation.deadline_unix_seconds <= now
                else FailureReason.LEASE_EXPIRED,
            )
            for held in self
            if held.ends_at <= now and held.stage is not Stage.RESERVING
        ]

    def next_expiry(self) -> float:
        """When `expired` may next find one; infinity while nothing is held."""
        ends = (held.ends_at for held in self if held.stage is not Stage.RESERVING)
        return min(ends, default=float("inf"))
