"""The connection of an engine to a worker that hosts modules of its instance.

Two implementations pass one contract suite: over a Link (`libs.worker.migration`), and in memory, beside the
host's engine in the same process.
"""

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from libs.engine.errors import EngineError
from libs.engine.hosting.calls import HostedCall


class HostLost(EngineError):
    """The host is gone, refuses, or broke down: whatever lay there is lost. Says which host and why."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"the host {worker} of some modules was lost: {why}")
        self.worker, self.why = worker, why


class Answer:
    """Comes once, from any thread; `wake` is called then."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._tensor: torch.Tensor | None = None
        self._error: HostLost | None = None
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Whether `result` returns at once."""
        return self._is_done

    def give(self, tensor: torch.Tensor) -> None:
        """The call is done. Only the first of `give` and `fail` counts."""
        self._end(tensor, None)

    def fail(self, error: HostLost) -> None:
        """It never will be."""
        self._end(None, error)

    def result(self) -> torch.Tensor:
        """What the call gave. Raises HostLost; ValueError before `is_done`."""
        if self._error is not None:
            raise self._error
        if self._tensor is None:
            raise ValueError("this answer has not come; wait until it is done")
        return self._tensor

    def _end(self, tensor: torch.Tensor | None, error: HostLost | None) -> None:
        with self._lock:
            if self._is_done:
                return
            self._tensor, self._error, self._is_done = tensor, error, True
        self._wake()


class Host(Protocol):
    """One worker that runs modules of our instance. Called on the owner's engine thread."""

    @property
    def worker(self) -> str:
        """Its incarnation."""
        ...

    def call(self, call: HostedCall) -> Answer:
        """Ask; calls are done in order. Never blocks.

        Tensors are not changed by the caller afterwards. The answer of a call that has none (see
        `calls.ANSWERED`) is done at once, or, where much is unsent, when there is room for more: who waits
        for it keeps unsent bytes bounded, and can run hosted work meanwhile. A lost host fails every answer,
        with HostLost, also the next ones.
        """
        ...
