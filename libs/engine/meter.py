"""How busy the engine was within the last second, and for whom."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_SECONDS = 1.0


@dataclass(frozen=True)
class _Spent:
    began: float
    end: float
    is_hosted: bool
    num_tokens: int = 0


class Meter:
    """Written by the engine's thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent: deque[_Spent] = deque()
        self._began: float | None = None

    def begin(self) -> None:
        """A step begins, or goes on."""
        with self._lock:
            self._began = self._clock()

    def pause(self) -> None:
        """The step that began last gives the device away, until `begin`."""
        with self._lock:
            if self._began is not None:
                self._add(_Spent(self._began, self._clock(), is_hosted=False))
            self._began = None

    def end(self, num_tokens: int | None) -> None:
        """The step that began last has run `num_tokens` tokens through the model, a part of one 0; None where
        there was nothing to run."""
        with self._lock:
            if self._began is not None and num_tokens is not None:
                self._add(_Spent(self._began, self._clock(), is_hosted=False, num_tokens=num_tokens))
            self._began = None

    def hosted(self, seconds: float) -> None:
        """A hosted module had the device until now."""
        with self._lock:
            now = self._clock()
            self._add(_Spent(now - seconds, now, is_hosted=True))

    def rates(self) -> tuple[float, float]:
        """Busy seconds per second, for whomever, and tokens per second, over the last second."""
        with self._lock:
            now = self._clock()
            first = now - WINDOW_SECONDS
            self._forget(now)
            busy = sum(one.end - max(one.began, first) for one in self._spent)
            if self._began is not None:
                busy += now - max(self._began, first)
            num_tokens = sum(
                one.num_tokens * (one.end - max(one.began, first)) / (one.end - one.began)
                if one.end > one.began
                else one.num_tokens
                for one in self._spent
            )
            return min(1.0, busy / WINDOW_SECONDS), num_tokens / WINDOW_SECONDS

    def hosted_share(self) -> float:
        """The part of the busy seconds per second that hosted modules had."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            first = now - WINDOW_SECONDS
            busy = sum(one.end - max(one.began, first) for one in self._spent if one.is_hosted)
            return min(1.0, busy / WINDOW_SECONDS)

    def _add(self, spent: _Spent) -> None:
        self._spent.append(spent)
        self._forget(spent.end)

    def _forget(self, now: float) -> None:
        while self._spent and self._spent[0].end <= now - WINDOW_SECONDS:
            self._spent.popleft()
