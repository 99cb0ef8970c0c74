"""Work that is done side by side: it ends with the client, and its first error is the error."""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work; raise ClientGone, the work being cancelled, if the client leaves first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
    await working


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextmanager
def first_error() -> Generator[None]:
    """Raise the first error of a group of tasks as it is; the others are consequences of it."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _first_leaf(group) from None


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
