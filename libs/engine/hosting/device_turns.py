"""Who has the device at each moment: own steps, hosted modules, or, where its share is used up, nobody."""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from libs.engine.hosting.hosted_modules import HostedModules
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.mailbox import Mailbox
from libs.engine.meter import Meter

_MIN_DEBT_SECONDS = 1e-6  # no sleep is so short
BURST_SECONDS = 0.25
"""Busy seconds that an idle worker saves up."""
OWN = ""
"""The name of the own steps."""


class DeviceShare:
    """A cap on busy seconds per second, `share` of each, so that a worker behaves like a slower device.

    A token bucket over measured busy time. What ran is paid afterwards, since nobody knows before how long a
    layer takes; so over any window the busy time is at most the share of it, the burst, and the piece that
    ran last. 0 < share <= 1. Owned by one thread.
    """

    def __init__(
        self,
        share: float,
        *,
        burst_seconds: float = BURST_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._burst_seconds = burst_seconds
        self._clock = clock
        self._saved_seconds = burst_seconds
        self._as_of = clock()

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to watch."""
        return self._share >= 1.0

    def spend(self, busy_seconds: float) -> None:
        """The device was busy."""
        if not self.is_whole:
            self._refill()
            self._saved_seconds -= busy_seconds

    def debt_seconds(self) -> float:
        """How long from now nothing may run; 0 where something may."""
        if self.is_whole:
            return 0.0
        self._refill()
        return -self._saved_seconds / self._share if self._saved_seconds < -_MIN_DEBT_SECONDS else 0.0

    def _refill(self) -> None:
        now = self._clock()
        saved = self._saved_seconds + (now - self._as_of) * self._share
        self._saved_seconds, self._as_of = min(self._burst_seconds, saved), now


class FairQueue:
    """Gives own steps and each owner with modules here equal shares of the device, layer by layer.

    Start-time fair queueing over measured busy seconds. Each party has a virtual time, which its busy seconds
    push on; the least goes first. One that comes back after a pause is lifted to the time of whoever ran
    last: so nobody saves up turns while it has nothing to do, and who has waits no longer than the others'
    pieces take. Plain state; no clock.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._ready: frozenset[str] = frozenset()
        self._now = 0.0
        """Virtual time of the last that was chosen."""

    def next(self, ready: Iterable[str]) -> str:
        """Who is to run now, of all that have something to run; an owner before own steps when equal.

        Own steps are many, an owner's call is one that somebody waits for.
        """
        names = frozenset(ready)
        if names != self._ready:
            self._note_ready(names)
        chosen = min(names, key=lambda name: (self._seconds[name], name == OWN, name))
        self._now = max(self._now, self._seconds[chosen])
        return chosen

    def charge(self, name: str, seconds: float) -> None:
        """It was busy for so long."""
        self._seconds[name] = self._seconds.get(name, self._now) + seconds

    def _note_ready(self, names: frozenset[str]) -> None:
        for name in names - self._ready:
            self._seconds[name] = max(self._seconds.get(name, 0.0), self._now)
        self._ready = names
        # Of others only those that are ahead matter: the rest would be lifted when they come back, if ever.
        self._seconds = {
            name: seconds for name, seconds in self._seconds.items() if name in names or seconds > self._now
        }


class DeviceTurns:
    """Belongs to the engine's thread, which tells when its own step begins and ends and when a layer of it is
    done, and asks here where else it would go on or sleep.

    `write` does the commands that are harmless while a step is under way. With nothing hosted and the whole
    device, nothing is measured or decided between layers.
    """

    def __init__(
        self,
        hosted: HostedModules,
        share: DeviceShare,
        meter: Meter,
        mailbox: Mailbox[Any],
        write: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hosted, self._share, self._meter = hosted, share, meter
        self._mailbox, self._write, self._clock = mailbox, write, clock
        self._turns = FairQueue()
        self._own_since: float | None = None
        """Since when own steps have had the device and not been charged."""
        self._is_alone = True
        """No hosted module had anything to run since then."""

    @property
    def has_work(self) -> bool:
        """Whether a hosted module has something to run."""
        return self._hosted.has_work

    @property
    def debt_seconds(self) -> float:
        """How long nobody may run."""
        return self._share.debt_seconds()

    def run_hosted(self, *, is_own_ready: bool) -> bool:
        """Runs a piece of an owner's calls if it is the turn of one; False where it is not."""
        ready = self._hosted.ready()
        if not ready:
            return False
        name = self._turns.next([OWN, *ready] if is_own_ready else ready)
        if name == OWN:
            return False
        began = self._clock()
        self._hosted.run_piece(name)
        seconds = self._clock() - began
        self._turns.charge(name, seconds)
        self._share.spend(seconds)
        self._meter.hosted(seconds)
        return True

    def begin_own(self) -> None:
        """A step begins."""
        self._meter.begin()
        self._own_since, self._is_alone = self._clock(), not self._hosted.has_work

    def end_own(self, num_tokens: int | None) -> None:
        """It is over; None where there was nothing to run."""
        self._meter.end(num_tokens)
        if num_tokens is not None:
            self._charge_own()
        self._own_since = None

    def between_layers(self) -> None:
        """A layer of a step is done: others may have the device, before it goes on."""
        if self._share.is_whole and not self._hosted.has_work:
            self._is_alone = True
            return
        self._charge_own()
        self._own_since = None
        self._meter.pause()
        while True:
            if debt := self.debt_seconds:
                self._mailbox.sleep(debt)
                self._write()
            elif not self.run_hosted(is_own_ready=True):
                break
        self._go_on()

    def wait(self, answer: Answer, timeout_seconds: float, worker: str) -> torch.Tensor:
        """What the host `worker` answers. Hosted modules have the device meanwhile, and writes go on; else
        two workers that host for each other would wait for ever. Raises HostLost, also when it is late."""
        if not answer.is_done:
            is_in_step = self._own_since is not None
            self._charge_own()
            self._own_since = None
            self._meter.pause()
            self._await(answer, timeout_seconds, worker)
            if is_in_step:
                self._go_on()
        return answer.result()

    def _await(self, answer: Answer, timeout_seconds: float, worker: str) -> None:
        deadline = self._clock() + timeout_seconds
        while not answer.is_done:
            self._write()
            left = deadline - self._clock()
            if left <= 0:
                answer.fail(HostLost(worker, f"no answer within {timeout_seconds} s"))
            elif debt := self.debt_seconds:
                self._mailbox.sleep(min(left, debt) if self._hosted.has_work else left)
            elif self.run_hosted(is_own_ready=False):
                self._mailbox.turn()  # else hosted work without end would keep the answer waiting
            else:
                self._mailbox.sleep(left)

    def _go_on(self) -> None:
        self._meter.begin()
        self._own_since, self._is_alone = self._clock(), not self._hosted.has_work

    def _charge_own(self) -> None:
        if self._own_since is None:
            return
        now = self._clock()
        self._turns.charge(OWN, now - self._own_since)
        self._share.spend(now - self._own_since)
        if self._is_alone:
            self._turns.next([OWN])  # owners that come now begin where own steps are
        self._own_since, self._is_alone = now, False
