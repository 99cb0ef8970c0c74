"""What carries a Link, and the frames on their way out."""

from collections.abc import Callable
from typing import Protocol

from libs.transport.credits import Credit
from libs.transport.memory import Memory
from libs.transport.port import LinkError

Done = Callable[[LinkError | None], None]
"""Told once, when a frame is taken or never will be."""


class Sending:
    """One frame on its way out."""

    __slots__ = ("body", "done", "error", "header", "is_done", "is_posted")

    def __init__(self, header: bytes, body: Memory, done: Done) -> None:
        self.header, self.body, self.done = header, body, done
        self.error: LinkError | None = None
        self.is_posted = self.is_done = False

    def finish(self, error: LinkError | None) -> None:
        """Tell the caller. Only the first call counts."""
        if not self.is_done:
            self.is_done, self.error = True, error
            self.done(error)


class Wire(Protocol):
    """What carries one Link. No call blocks or raises for the peer's faults; those are told to
    `PeerLink.lose`."""

    def post(self, sending: Sending, credit: Credit) -> None:
        """Start one send, in order; `PeerLink.on_sent` ends it. `credit` travels along."""
        ...

    def tell(self, credit: Credit) -> None:
        """Send credit without a frame."""
        ...

    def post_close(self) -> None:
        """Tell the peer that nothing follows; comes to it after all frames."""
        ...

    def abort(self) -> None:
        """Free everything now; what is under way may be cut. Called once, by `PeerLink.lose`."""
        ...
