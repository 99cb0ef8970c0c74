"""Commands on their way from the event loop to the engine's thread."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from libs.engine.thread_loop import ThreadLoop

T = TypeVar("T")


class Mailbox(Generic[T]):
    """First in, first out. The sender sees `len` and stops in time; the one taker may sleep, and turns its
    `loop` meanwhile."""

    def __init__(self, loop: ThreadLoop) -> None:
        self._loop = loop
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._has_news = False
        """Since the taker slept last."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Never waits."""
        with self._lock:
            self._items.append(item)
        self.wake()

    def wake(self) -> None:
        """Something else than an item has come: the taker sleeps no more, or not next time."""
        with self._lock:
            is_told, self._has_news = self._has_news, True
        if not is_told:
            self._loop.wake()

    def take_all(self, *, wait: bool, timeout_seconds: float | None = None) -> list[T]:
        """Everything that is here; with `wait`, sleeps for the first item or a `wake`, at most
        `timeout_seconds`."""
        if wait and not self._items:
            self.sleep(timeout_seconds)
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items

    def sleep(self, timeout_seconds: float | None) -> None:
        """Until something comes that had not come when the taker slept last."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._has_news:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self._loop.sleep(left)
        with self._lock:
            self._has_news = False

    def turn(self) -> None:
        """What has come on the loop is heard, without sleeping."""
        self._loop.turn()

    def take(self, wanted: Callable[[T], bool]) -> list[T]:
        """The items that are `wanted`, wherever they are; those and the others keep their order."""
        with self._lock:
            taken = [item for item in self._items if wanted(item)]
            if taken:
                self._items = deque(item for item in self._items if not wanted(item))
        return taken
