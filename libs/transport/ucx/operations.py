"""What is under way in a worker: who waits for it, what it keeps alive, and on which endpoint."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

Done = Callable[[int], None]
"""Called with the status when an operation ends."""

NO_ENDPOINT = 0


class Operation(NamedTuple):
    """`kept_alive` is memory that UCX reads or writes until the end."""

    endpoint: int
    done: Done
    num_bytes: int
    kept_alive: object


class Operations:
    """The table of operations, by the number that UCX hands back to us."""

    def __init__(self) -> None:
        self.next_number = 1
        self.num_bytes = 0
        self._operations: dict[int, Operation] = {}
        self._per_endpoint: Counter[int] = Counter()
        self._dry = asyncio.Event()

    def __len__(self) -> int:
        return len(self._operations)

    def num_on(self, endpoint: int) -> int:
        """How many use this endpoint."""
        return self._per_endpoint[endpoint]

    def begin(self, operation: Operation) -> None:
        """Enter an operation under `next_number`."""
        self._operations[self.next_number] = operation
        self.next_number += 1
        self.num_bytes += operation.num_bytes
        self._per_endpoint[operation.endpoint] += 1

    def end(self, number: int) -> Operation:
        """Take an operation out."""
        operation = self._operations.pop(number)
        self.num_bytes -= operation.num_bytes
        self._per_endpoint[operation.endpoint] -= 1
        if not self._per_endpoint[operation.endpoint]:
            del self._per_endpoint[operation.endpoint]
        if not self._operations:
            self._dry.set()
        return operation

    async def wait_dry(self) -> None:
        """Until none is left."""
        while self._operations:
            self._dry.clear()
            await self._dry.wait()
