"""Work on weights beside the engine's thread."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


async def aside(act: Callable[[], T]) -> T:
    """Runs `act` in a thread of its own, on one core: steps go on meanwhile, and threads of one operation
    that wait for each other's cores would take them from the engine."""

    def run() -> T:
        torch.set_num_threads(1)  # of this thread
        return act()

    return await asyncio.to_thread(run)
