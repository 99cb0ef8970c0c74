"""One attempt at one prompt whose KV goes to a decode worker, from its arrival to its hand-over."""

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import Span

from libs.bus.messages.generation import Prefill
from libs.worker.prefill.kv_sender import KvSender
from libs.worker.prefill.prompt import Prompt


@dataclass(slots=True, eq=False, kw_only=True)
class PrefillRequest(Prompt):
    """A prompt, and where its KV goes."""

    request: Prefill
    arrived_at: float
    span: Span
    task: "asyncio.Task[None] | None" = None
    sender: KvSender | None = None
    outcome: str = "aborted"

    def restart(self) -> None:
        """See Prompt."""
        Prompt.restart(self)
        if self.sender is not None:
            self.sender.drop_layers(self)
