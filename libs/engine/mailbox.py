"""Commands on their way from the event loop to the engine's thread."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out. The sender sees `len` and stops in time; the one taker may sleep."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Never waits."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def take_all(self, *, wait: bool, timeout_seconds: float | None = None) -> list[T]:
        """Everything that is here; with `wait`, sleeps for the first item, at most `timeout_seconds`."""
        if not wait and not self._items:
            return []
        with self._changed:
            if wait and not self._items:
                self._changed.wait_for(lambda: self._items, timeout_seconds)
            items = list(self._items)
            self._items.clear()
            return items

    def take(self, wanted: Callable[[T], bool]) -> list[T]:
        """The items that are `wanted`, wherever they are; those and the others keep their order."""
        with self._changed:
            taken = [item for item in self._items if wanted(item)]
            if taken:
                self._items = deque(item for item in self._items if not wanted(item))
        return taken
