"""One end of a connection, whatever carries it: deadlines, credits, the order of sends, the inbox, the way it
ends.

A Wire moves frames and knows nothing of these; it reports to its PeerLink through the `on_...` methods and
`lose`. Everything runs in the event loop's thread.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from libs.transport.credits import Credit, LinkLimits, ReceiveWindow, SendWindow
from libs.transport.memory import NO_BODY, Bytes, Memory, as_memory, view
from libs.transport.port import MAX_HEADER_BYTES, FrameTooLarge, LinkError, LinkLost, LinkTimeout

CLOSE_SECONDS = 2.0
"""How long a close waits for the peer to have taken in what was sent."""

NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)


class Sending:
    """One frame on its way out."""

    __slots__ = ("body", "error", "header", "is_done", "is_posted", "waiter")

    def __init__(self, header: bytes, body: Memory, waiter: "asyncio.Future[None]") -> None:
        self.header, self.body, self.waiter = header, body, waiter
        self.error: LinkError | None = None
        self.is_posted = self.is_done = False

    def finish(self, error: LinkError | None) -> None:
        """Wake the caller. Only the first call counts."""
        if not self.is_done:
            self.is_done, self.error = True, error
            if not self.waiter.done():
                self.waiter.set_result(None)


class Frame:
    """One received frame (port.Received)."""

    __slots__ = ("_memory", "_release", "header")

    def __init__(self, header: bytes, memory: Memory, release: Callable[[Memory], None]) -> None:
        self.header, self._memory = header, memory
        self._release: Callable[[Memory], None] | None = release

    @property
    def body(self) -> Bytes:
        """The body as a host array; see port.Received."""
        return view(self._memory) if self._memory.num_bytes else NO_BYTES

    @property
    def memory(self) -> Memory:
        """The body wherever it lies, also in device memory. Valid until `release`."""
        return self._memory

    def release(self) -> None:
        """See port.Received."""
        release, self._release = self._release, None
        memory, self._memory = self._memory, NO_BODY
        if release is not None:
            release(memory)


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


class PeerLink:
    """A Link (port.Link) over a Wire."""

    def __init__(
        self, peer: str, own: LinkLimits, theirs: LinkLimits, on_gone: "Callable[[PeerLink], None]"
    ) -> None:
        self._peer, self._theirs, self._on_gone = peer, theirs, on_gone
        self._outgoing, self._incoming = SendWindow(theirs), ReceiveWindow(own)
        self._queued: deque[Sending] = deque()  # one entry per caller that waits in `send`
        self._posted: set[Sending] = set()
        self._inbox: deque[Frame] = deque()  # bounded by the receive window
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._gone = asyncio.Event()
        self._end: LinkLost | None = None
        self._is_closing = False
        self._wire: Wire | None = None

    def attach(self, wire: Wire) -> None:
        """Put the Link on its wire, once, before anybody gets hold of the Link."""
        self._wire = wire

    @property
    def peer(self) -> str:
        """See port.Link."""
        return self._peer

    @property
    def is_open(self) -> bool:
        """See port.Link."""
        return self._end is None and not self._is_closing

    # Sending

    async def send(
        self, header: bytes, body: Bytes | Memory | None = None, *, timeout_seconds: float
    ) -> None:
        """See port.Link."""
        memory = NO_BODY if body is None else as_memory(body)
        self._check_size(len(header), memory.num_bytes)
        if not self.is_open:
            raise self._lost()
        sending = Sending(header, memory, self._loop.create_future())
        self._queued.append(sending)
        self._pump()
        if not sending.is_done:
            await self._wait(sending, timeout_seconds)
        if sending.error is not None:
            raise sending.error

    def _check_size(self, header_bytes: int, body_bytes: int) -> None:
        if header_bytes > MAX_HEADER_BYTES:
            raise FrameTooLarge(f"a header of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
        if body_bytes > self._theirs.max_body_bytes:
            raise FrameTooLarge(
                f"a body of {body_bytes} bytes; {self._peer} takes {self._theirs.max_body_bytes}: send parts"
            )

    def _pump(self) -> None:
        while (
            self._queued
            and self._wire is not None
            and self._outgoing.can_send(self._queued[0].body.num_bytes)
        ):
            sending = self._queued.popleft()
            self._outgoing.send(sending.body.num_bytes)
            sending.is_posted = True
            self._posted.add(sending)
            self._wire.post(sending, self._incoming.tell())

    async def _wait(self, sending: Sending, timeout_seconds: float) -> None:
        expiry = self._loop.call_later(timeout_seconds, self._expire, sending, timeout_seconds)
        is_cancelled = False
        try:
            while not sending.is_done:
                try:
                    await sending.waiter
                except asyncio.CancelledError:
                    is_cancelled = True
                    if not sending.is_posted:
                        self._withdraw(sending)
                        raise
                    # The wire still reads the body, which the caller may reuse once we return.
                    sending.waiter = self._loop.create_future()
        finally:
            expiry.cancel()
        if is_cancelled:
            raise asyncio.CancelledError

    def _withdraw(self, sending: Sending) -> None:
        if sending in self._queued:
            self._queued.remove(sending)
            self._pump()

    def _expire(self, sending: Sending, timeout_seconds: float) -> None:
        if sending.is_done:  # taken in the same turn of the loop: its caller is about to end this timer
            return
        what = f"a send of {sending.body.num_bytes} bytes to {self._peer}"
        state = "was not taken" if sending.is_posted else "got no credit: the peer does not consume"
        sending.finish(LinkTimeout(f"{what} {state} within {timeout_seconds} s"))
        self.lose(LinkLost(f"{what} passed its deadline"))

    # What the wire reports

    def on_sent(self, sending: Sending) -> None:
        """The body may be reused."""
        self._posted.discard(sending)
        sending.finish(None)
        if self._is_closing and not self._posted and self._end is None and self._wire is not None:
            self._wire.post_close()

    def on_arriving(self, num_bytes: int) -> bool:
        """A frame comes. False, and the Link is lost, when it has no credit."""
        if self._end is None and not self._incoming.can_arrive(num_bytes):
            self.lose(LinkLost(f"{self._peer} sent {num_bytes} bytes beyond its credit"))
        if self._end is not None:
            return False
        self._incoming.arrive(num_bytes)
        return True

    def on_frame(self, header: bytes, memory: Memory, give_back: Callable[[], None] | None) -> None:
        """A frame announced by `on_arriving` is complete, the next in order."""
        if self._end is not None:
            if give_back is not None:
                give_back()
            return

        def release(memory: Memory) -> None:
            if give_back is not None:
                give_back()
            self._released(memory.num_bytes)

        self._inbox.append(Frame(header, memory, release))
        self._wake_receiver()

    def on_credit(self, credit: Credit) -> None:
        """The peer released frames."""
        if not self._outgoing.credit(credit):
            self.lose(LinkLost(f"{self._peer} released more than it was sent"))
        self._pump()

    def on_close(self) -> None:
        """The peer sends nothing any more."""
        self.lose(LinkLost(f"{self._peer} closed the Link"))

    def lose(self, error: LinkLost) -> None:
        """The Link is over: fail all that waits on it. Only the first call counts."""
        if self._end is not None:
            return
        self._end = LinkLost("this side closed the Link") if self._is_closing else error
        unfinished = [*self._posted, *self._queued]
        self._posted.clear()
        self._queued.clear()
        for sending in unfinished:
            sending.finish(self._lost())
        while self._receivers:
            self._wake_receiver()
        if self._wire is not None:
            self._wire.abort()
        self._gone.set()
        self._on_gone(self)

    def _lost(self) -> LinkLost:
        return LinkLost("this side closed the Link" if self._end is None else str(self._end))

    # Receiving

    async def receive(self, *, timeout_seconds: float | None = None) -> Frame:
        """See port.Link."""
        if not self._inbox:
            await self._await_frame(timeout_seconds)
        return self._inbox.popleft()

    async def _await_frame(self, timeout_seconds: float | None) -> None:
        expiry: asyncio.TimerHandle | None = None
        timed_out: list[bool] = []
        try:
            while not self._inbox:
                if self._end is not None:
                    raise self._lost()
                if timed_out:
                    raise LinkTimeout(f"no frame from {self._peer} within {timeout_seconds} s")
                waiter: asyncio.Future[None] = self._loop.create_future()
                self._receivers.append(waiter)
                if timeout_seconds is not None and expiry is None:
                    expiry = self._loop.call_later(timeout_seconds, self._end_wait, timed_out)
                await self._sleep(waiter)
        finally:
            if expiry is not None:
                expiry.cancel()

    def _end_wait(self, timed_out: list[bool]) -> None:
        timed_out.append(True)
        for waiter in self._receivers:
            if not waiter.done():
                waiter.set_result(None)
        self._receivers.clear()

    async def _sleep(self, waiter: "asyncio.Future[None]") -> None:
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._receivers:
                self._receivers.remove(waiter)
            elif self._inbox:
                self._wake_receiver()  # the wake-up meant for us goes to the next one
            raise

    def _wake_receiver(self) -> None:
        while self._receivers:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _released(self, num_bytes: int) -> None:
        self._incoming.release(num_bytes)
        if self._end is None and self._wire is not None and self._incoming.is_credit_due():
            self._wire.tell(self._incoming.tell())

    # The end

    async def close(self) -> None:
        """See port.Link. Waits at most CLOSE_SECONDS for the peer."""
        if self.is_open:
            self._is_closing = True
            while self._queued:
                self._queued.popleft().finish(self._lost())
            if not self._posted and self._wire is not None:
                self._wire.post_close()
        try:
            await asyncio.wait_for(self._gone.wait(), CLOSE_SECONDS)
        except TimeoutError:
            pass  # the peer is silent; what it did not take in is lost with it
        finally:
            self.lose(LinkLost("this side closed the Link"))
            while self._inbox:
                self._inbox.popleft().release()
