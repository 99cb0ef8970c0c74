"""One end of a connection, whatever carries it: deadlines, credits, the order of sends, the inbox, the way it
ends.

A Wire (wire.Wire) moves frames and knows nothing of these; it reports to its PeerLink through the `on_...`
methods and `lose`. Everything runs in the event loop's thread, `post` and `Frame.release` also while the loop
stands still.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import structlog

from libs.transport.credits import Credit, LinkLimits, ReceiveWindow, SendWindow
from libs.transport.memory import NO_BODY, Bytes, Memory, as_memory, view
from libs.transport.port import MAX_HEADER_BYTES, FrameTooLarge, LinkError, LinkLost, LinkTimeout
from libs.transport.wire import Done, Sending, Wire

CLOSE_SECONDS = 2.0
"""How long a close waits for the peer to have taken in what was sent."""

NO_BYTES: Bytes = np.empty(0, dtype=np.uint8)

_log = structlog.get_logger(__name__)


def _nobody_waits(_error: LinkError | None) -> None:
    """Done before anybody had to wait."""


def _wake(waiter: "asyncio.Future[None]", _error: LinkError | None) -> None:
    if not waiter.done():
        waiter.set_result(None)


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
        self._unended_posts: dict[Sending, None] = {}
        """In order: the first is the one to blame when none of them ends."""
        self._posts_quiet_since = 0.0
        self._watchdog: asyncio.TimerHandle | None = None
        self._deliver: Callable[[Frame], None] | None = None
        self._tell_lost: Callable[[LinkLost], None] | None = None
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
        sending = self._begin(header, body, _nobody_waits)
        if not sending.is_done:
            await self._wait(sending, timeout_seconds)
        if sending.error is not None:
            raise sending.error

    def post(self, header: bytes, body: Bytes | Memory | None, done: Done, *, timeout_seconds: float) -> None:
        """See port.Link."""
        sending = self._begin(header, body, done)
        if not sending.is_done:
            sending.done = partial(self._post_ended, sending, done)
            if not self._unended_posts:
                self._posts_quiet_since = self._loop.time()
            self._unended_posts[sending] = None
            if self._watchdog is None:
                self._watchdog = self._loop.call_later(timeout_seconds, self._watch, timeout_seconds)

    def _post_ended(self, sending: Sending, done: Done, error: LinkError | None) -> None:
        del self._unended_posts[sending]
        self._posts_quiet_since = self._loop.time()
        done(error)

    def _watch(self, timeout_seconds: float) -> None:
        """Posts come in bursts: the time of each begins when the one before it has ended."""
        self._watchdog = None
        if not self._unended_posts or self._end is not None:
            return
        left = timeout_seconds - (self._loop.time() - self._posts_quiet_since)
        if left > 0:
            self._watchdog = self._loop.call_later(left, self._watch, timeout_seconds)
        else:
            self._expire(next(iter(self._unended_posts)), timeout_seconds)

    def _begin(self, header: bytes, body: Bytes | Memory | None, done: Done) -> Sending:
        memory = NO_BODY if body is None else as_memory(body)
        self._check_size(len(header), memory.num_bytes)
        if not self.is_open:
            raise self._lost()
        sending = Sending(header, memory, done)
        self._queued.append(sending)
        self._pump()
        return sending

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
            try:
                self._wire.post(sending, self._incoming.tell())
            except OSError as error:  # no memory to share, no descriptor left
                self.lose(LinkLost(f"a frame for {self._peer} cannot be sent: {error}"))

    async def _wait(self, sending: Sending, timeout_seconds: float) -> None:
        expiry = self._loop.call_later(timeout_seconds, self._expire, sending, timeout_seconds)
        is_cancelled = False
        try:
            while not sending.is_done:
                waiter: asyncio.Future[None] = self._loop.create_future()
                sending.done = partial(_wake, waiter)
                try:
                    await waiter
                except asyncio.CancelledError:
                    is_cancelled = True
                    if not sending.is_posted:
                        self._withdraw(sending)
                        raise
                    # Else wait on: the wire still reads the body, which the caller may reuse once we return.
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

        frame = Frame(header, memory, release)
        if self._deliver is not None:
            self._is_taken(frame, self._deliver)
        else:
            self._inbox.append(frame)
            self._wake_receiver()

    def _is_taken(self, frame: Frame, take: Callable[[Frame], None]) -> bool:
        try:
            take(frame)
            return True
        except Exception as error:  # noqa: BLE001 - other frames of the same turn are not to be lost with it
            _log.exception("frame_not_taken", peer=self._peer)
            self.lose(LinkLost(f"taking in a frame of {self._peer} failed: {error}"))
            return False

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
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._gone.set()
        self._on_gone(self)
        tell_lost, self._deliver, self._tell_lost = self._tell_lost, None, None
        if tell_lost is not None:
            tell_lost(self._lost())

    def _lost(self) -> LinkLost:
        return LinkLost("this side closed the Link" if self._end is None else str(self._end))

    # Receiving

    async def receive(self, *, timeout_seconds: float | None = None) -> Frame:
        """See port.Link."""
        if not self._inbox:
            await self._await_frame(timeout_seconds)
        return self._inbox.popleft()

    def deliver(self, take: Callable[[Frame], None], lost: Callable[[LinkLost], None]) -> None:
        """See port.Link."""
        self._deliver = take
        while self._inbox and self._is_taken(self._inbox.popleft(), take):
            pass
        while self._inbox:
            self._inbox.popleft().release()
        self._tell_lost = lost
        if self._end is not None:
            lost(self._lost())

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
