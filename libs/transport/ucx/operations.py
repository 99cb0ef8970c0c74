"""What is under way in a worker: who waits for it and what it keeps alive."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

Done = Callable[[int], None]
"""Called with the status when an operation ends."""


class Operation(NamedTuple):
    """`kept_alive` is memory that UCX reads or writes until the end."""

    done: Done
    num_bytes: int
    kept_alive: object


class Operations:
    """The table of operations, by the number that UCX hands back to us."""

    def __init__(self) -> None:
        self.next_number = 1
        self.num_bytes = 0
        self._operations: dict[int, Operation] = {}
        self._dry = asyncio.Event()

    def __len__(self) -> int:
        return len(self._operations)

    def begin(self, operation: Operation) -> None:
        """Enter an operation under `next_number`."""
        self._operations[self.next_number] = operation
        self.next_number += 1
        self.num_bytes += operation.num_bytes

    def end(self, number: int) -> Operation:
        """Take an operation out."""
        operation = self._operations.pop(number)
        self.num_bytes -= operation.num_bytes
        if not self._operations:
            self._dry.set()
        return operation

    async def wait_dry(self) -> None:
        """Until none is left."""
        while self._operations:
            self._dry.clear()
            await self._dry.wait()
