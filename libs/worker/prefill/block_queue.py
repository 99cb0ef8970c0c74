"""Prompts wait for KV blocks of the pool in order of arrival."""

import asyncio

from libs.engine.engine import Engine
from libs.engine.outputs import Reservation
from libs.request.generation import Generation


class BlockQueue:
    """Blocks for whole prompts: those that need not run at once wait here for room."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._first_in_line = asyncio.Lock()
        self._num_waiting = 0
        self._freed = asyncio.Event()

    def freed(self) -> None:
        """Some sequence gave its blocks back."""
        self._freed.set()

    async def reserve_now(self, generation: Generation) -> Reservation | None:
        """None where there is no room, or others wait for it. Raises as `Engine.reserve` does."""
        return None if self._num_waiting else await self._reserve(generation)

    async def reserve(self, generation: Generation) -> Reservation:
        """Waits for room. Raises as `Engine.reserve` does."""
        # The engine answers between its steps. If each prompt awaited the one before it, every step would
        # have one of them.
        reservation = await self.reserve_now(generation)
        if reservation is not None:
            return reservation
        self._num_waiting += 1
        try:
            async with self._first_in_line:
                while True:
                    self._freed.clear()
                    reservation = await self._reserve(generation)
                    if reservation is not None:
                        return reservation
                    await self._freed.wait()
        finally:
            self._num_waiting -= 1

    async def _reserve(self, generation: Generation) -> Reservation | None:
        return await self._engine.reserve(generation, sequence_id=generation.request_id, whole_prompt=True)
