"""How busy the engine was within the last second."""

import threading
import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 1.0


class Meter:
    """Written by the engine's thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: deque[tuple[float, float, int]] = deque()
        self._began: float | None = None

    def begin(self) -> None:
        """A step begins."""
        with self._lock:
            self._began = self._clock()

    def end(self, num_tokens: int | None) -> None:
        """The step that began last has run `num_tokens` tokens through the model, a part of one 0; None where
        there was nothing to run."""
        with self._lock:
            now = self._clock()
            if self._began is not None and num_tokens is not None:
                self._steps.append((self._began, now, num_tokens))
            self._began = None
            self._forget(now)

    def rates(self) -> tuple[float, float]:
        """Busy seconds per second, and tokens per second, over the last second."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            first = now - WINDOW_SECONDS
            busy = sum(end - max(began, first) for began, end, _ in self._steps)
            if self._began is not None:
                busy += now - max(self._began, first)
            num_tokens = sum(
                count * (end - max(began, first)) / (end - began) if end > began else count
                for began, end, count in self._steps
            )
            return min(1.0, busy / WINDOW_SECONDS), num_tokens / WINDOW_SECONDS

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][1] <= now - WINDOW_SECONDS:
            self._steps.popleft()
