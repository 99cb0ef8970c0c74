"""Hosts in the home's own process: beside the host's engine, or on its hosted modules without any thread."""

from collections.abc import Callable

import torch

from libs.engine.hosting.calls import ANSWERED, HostedCall
from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import Answer

Ask = Callable[[str, HostedCall, Answer], None]
"""Guest, call and the answer to give; does not wait. As `Hosting.call`."""


class MemoryHost:
    """A Host whose calls go to another engine in this process. `wake` is called with each answer."""

    def __init__(self, worker: str, guest: str, ask: Ask, wake: Callable[[], None]) -> None:
        self._worker, self._guest, self._ask, self._wake = worker, guest, ask, wake

    @property
    def worker(self) -> str:
        """See Host."""
        return self._worker

    def call(self, call: HostedCall) -> Answer:
        """See Host."""
        answer = Answer(self._wake)
        self._ask(self._guest, call, answer)
        if isinstance(call, ANSWERED):
            return answer
        told = Answer(self._wake)
        told.give(torch.empty(0))
        return told


def synchronous_host(worker: str, guest: str, hosted: HostedModules) -> MemoryHost:
    """A host that is done with a call when `call` returns."""

    def ask(name: str, call: HostedCall, answer: Answer) -> None:
        hosted.put(name, call, answer)
        hosted.run_all()

    return MemoryHost(worker, guest, ask, lambda: None)
