"""The workers that run modules of this instance, as its engine thread sees them."""

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from libs.engine.hosting.calls import ANSWERED, BeginStep, HostedCall
from libs.engine.hosting.port import Answer, Host, HostLost
from libs.engine.meter import Meter

Wait = Callable[[str, Answer], torch.Tensor]
"""Returns what this worker answers once it is there; raises HostLost."""


def result_now(worker: str, answer: Answer) -> torch.Tensor:
    """The wait for hosts that answer before `call` returns."""
    return answer.result()


class Hosts:
    """By incarnation. `away` measures how long was waited for them."""

    def __init__(self, wait: Wait, away: Meter) -> None:
        self._wait, self._away = wait, away
        self._hosts: dict[str, Host] = {}
        self._begun: dict[str, BeginStep] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._hosts

    def add(self, host: Host) -> None:
        """From now on it can be asked; a newer Host of the same worker replaces the older one."""
        self._hosts[host.worker] = host
        self._begun.pop(host.worker, None)

    def keep(self, workers: Iterable[str]) -> None:
        """Forgets all others."""
        kept = set(workers)
        self._hosts = {worker: host for worker, host in self._hosts.items() if worker in kept}
        self._begun = {worker: step for worker, step in self._begun.items() if worker in kept}

    def begin(self, worker: str, step: BeginStep) -> None:
        """Tells the host the arrays of a step, unless they are what it heard last: a step that was put aside
        tells them again."""
        if self._begun.get(worker) is not step:
            self.call(worker, step)
            self._begun[worker] = step

    def call(self, worker: str, call: HostedCall) -> Answer:
        """Raises HostLost where nothing is known of the worker any more. Waits where too much is unsent."""
        host = self._hosts.get(worker)
        if host is None:
            raise HostLost(worker, "no Link to it is known here")
        answer = host.call(call)
        if not isinstance(call, ANSWERED) and not answer.is_done:
            with suppress(HostLost):  # the next call that has an answer tells
                self.wait(worker, answer)
        return answer

    def tell_all(self, call: HostedCall) -> None:
        """A small call without an answer, to every host. Does not wait."""
        for host in self._hosts.values():
            host.call(call)

    def wait(self, worker: str, answer: Answer) -> torch.Tensor:
        """What the worker's call gave. Raises HostLost."""
        if answer.is_done:
            return answer.result()
        self._away.begin()
        try:
            return self._wait(worker, answer)
        finally:
            self._away.end(0)

    def ask(self, worker: str, call: HostedCall) -> torch.Tensor:
        """Calls and waits. Raises HostLost."""
        return self.wait(worker, self.call(worker, call))
