"""What a prefill worker says of the prompts it runs: how many it has done, and how much KV has left it.

KV leaves chunk by chunk. So a worker that has sent more than its done prompts have is in the middle of one.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from tiny_model import BLOCK_BYTES

from black_box import Mesh

BETWEEN_READINGS_SECONDS = 0.04

_SENT = re.compile(r'^kvmesh_kv_transfer_bytes_total{[^}]*direction="sent"[^}]*} (\S+)$', re.MULTILINE)
_DONE = re.compile(r"^kvmesh_request_prefill_time_seconds_count(?:{[^}]*})? (\S+)$", re.MULTILINE)


class Reading(NamedTuple):
    """The figures of a moment between `asked_at` and `answered_at`, in unix seconds."""

    asked_at: float
    answered_at: float
    num_sent_bytes: int
    num_done: int


@dataclass
class HandedOver:
    """Readings one after the other. All prompts have `num_prompt_blocks` blocks, of which none is found."""

    address: str
    num_prompt_blocks: int
    readings: list[Reading] = field(default_factory=list[Reading])

    @property
    def num_done(self) -> int:
        """Prompts since the first reading."""
        return self.readings[-1].num_done - self.readings[0].num_done

    @property
    def num_blocks(self) -> int:
        """Sent since the first reading."""
        return (self.readings[-1].num_sent_bytes - self.readings[0].num_sent_bytes) // BLOCK_BYTES

    def is_in_a_prompt(self, reading: Reading) -> bool:
        """Whether some of the KV of a prompt that is not done has left."""
        num_done = reading.num_done - self.readings[0].num_done
        num_bytes = reading.num_sent_bytes - self.readings[0].num_sent_bytes
        return num_bytes > num_done * self.num_prompt_blocks * BLOCK_BYTES

    def switched_within_a_prompt(self, record: dict[str, Any]) -> bool:
        """Whether a prompt was begun before the switch of a move and not done at it.

        A switch is at the end of a step: the prompt is in several chunks, and the switch between two of them.
        """
        took = record["phase_seconds"]
        first = record["started_unix_seconds"] + sum(
            took.get(phase, 0.0) for phase in ("planned", "reserving", "copying", "catching_up")
        )
        last = first + took["switching"]
        before = next(r for r in reversed(self.readings) if r.answered_at < first)
        after = next(r for r in self.readings if r.asked_at > last)
        return self.is_in_a_prompt(before) and before.num_done == after.num_done

    async def read(self, client: httpx.AsyncClient) -> None:
        asked_at = time.time()
        text = (await client.get(self.address + "/metrics")).raise_for_status().text
        sent, done = _SENT.search(text), _DONE.search(text)
        assert done, text
        num_sent = int(float(sent[1])) if sent else 0
        self.readings.append(Reading(asked_at, time.time(), num_sent, int(float(done[1]))))


@asynccontextmanager
async def handed_over(mesh: Mesh, name: str, num_prompt_blocks: int) -> AsyncIterator[HandedOver]:
    """Reads until the end of the block, at which everything that was asked for must have come."""
    seen = HandedOver(mesh.service(name)["http_address"], num_prompt_blocks)
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:

        async def go_on() -> None:
            while True:
                await asyncio.sleep(BETWEEN_READINGS_SECONDS)
                await seen.read(client)

        await seen.read(client)
        reading = asyncio.create_task(go_on())
        try:
            yield seen
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        await seen.read(client)
