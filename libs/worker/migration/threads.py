"""Work in another thread, and work on the event loop of another."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_LOOK_SECONDS = 1.0
"""A loop that ends drops what was handed to it last without a word."""


class LoopEnded(Exception):
    """The other loop ended before the work did."""

    def __init__(self) -> None:
        super().__init__("the loop that this should run on has ended")


async def run_on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Does `work` on `loop`, which may be the running one, and gives what it gives; a cancelled wait cancels
    it. Raises LoopEnded."""
    if loop is asyncio.get_running_loop():
        return await work
    try:
        handed = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    except RuntimeError:
        work.close()
        raise LoopEnded from None
    try:
        while not handed.done():
            await asyncio.wait({handed}, timeout=_LOOK_SECONDS)
            if loop.is_closed() and not handed.done():
                raise LoopEnded
    finally:
        handed.cancel()
        if loop.is_closed():
            work.close()  # if it never began
    if handed.cancelled():
        raise LoopEnded
    return handed.result()


async def run_in_thread(act: Callable[[], T]) -> T:
    """Runs `act` in a thread of its own, on one core: steps go on meanwhile, and threads of one operation
    that wait for each other's cores would take them from the engine."""

    def run() -> T:
        torch.set_num_threads(1)  # of this thread
        return act()

    return await asyncio.to_thread(run)
