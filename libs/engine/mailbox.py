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
        self._has_news = False
        """Since the taker slept last."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Never waits."""
        with self._changed:
            self._items.append(item)
            self._has_news = True
            self._changed.notify()

    def wake(self) -> None:
        """Something else than an item has come: the taker sleeps no more, or not next time."""
        with self._changed:
            self._has_news = True
            self._changed.notify()

    def take_all(self, *, wait: bool, timeout_seconds: float | None = None) -> list[T]:
        """Everything that is here; with `wait`, sleeps for the first item or a `wake`, at most
        `timeout_seconds`."""
        if not wait and not self._items:
            return []
        with self._changed:
            if wait and not self._items:
                self._sleep(timeout_seconds)
            items = list(self._items)
            self._items.clear()
            return items

    def sleep(self, timeout_seconds: float | None) -> None:
        """Until something comes that had not come when the taker slept last."""
        with self._changed:
            self._sleep(timeout_seconds)

    def take(self, wanted: Callable[[T], bool]) -> list[T]:
        """The items that are `wanted`, wherever they are; those and the others keep their order."""
        with self._changed:
            taken = [item for item in self._items if wanted(item)]
            if taken:
                self._items = deque(item for item in self._items if not wanted(item))
        return taken

    def _sleep(self, timeout_seconds: float | None) -> None:
        self._changed.wait_for(lambda: self._has_news, timeout_seconds)
        self._has_news = False
