"""Calls of an owner over a Link of their own."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count

import structlog

from libs.engine.hosting.calls import ANSWERED, WriteBlocks
from libs.engine.hosting.hosting import Hosting
from libs.engine.hosting.port import Answer, HostLost
from libs.transport.port import Link, LinkLost, Received
from libs.worker.migration.framing import Assembly, BadFrame, Message, Outgoing, owned
from libs.worker.migration.host.server import MAX_DETAIL_CHARACTERS
from libs.worker.migration.protocol import Call, CallFailed, Result

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Running:
    """A call that the engine has; `frame` is the memory that it reads."""

    call_id: int
    answer: Answer
    frame: Received | None
    began: float


class OwnerCalls:
    """Serves one Link from when it is made, on the Link's loop, until the Link is over. Calls for modules
    that are not here, or not any more, are failed by the engine. `on_call_done` hears how long one took,
    `on_over` that the Link is over."""

    def __init__(
        self,
        link: Link,
        hosting: Hosting,
        *,
        send_timeout_seconds: float,
        on_call_done: Callable[[float], None],
        on_over: "Callable[[OwnerCalls], None]",
    ) -> None:
        self._link, self._hosting = link, hosting
        self._on_call_done, self._on_over = on_call_done, on_over
        self._outgoing = Outgoing(link, send_timeout_seconds)
        self._assembly = Assembly()
        self._running: dict[int, _Running] = {}
        self._numbers = count()
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._closing: asyncio.Task[None] | None = None
        link.deliver(self._take, self._lost)

    @property
    def name(self) -> str:
        """The owner's incarnation."""
        return self._link.peer

    def close(self) -> None:
        """Nothing that still comes is done. Idempotent."""
        self._outgoing.close()
        if self._closing is None:
            self._closing = self._loop.create_task(self._link.close())

    def _lost(self, error: LinkLost) -> None:
        log.info("owner_calls_ended", owner=self.name, reason=str(error))
        self._outgoing.close()
        self._on_over(self)

    def _take(self, frame: Received) -> None:
        is_kept = False
        try:
            message = None if self._closing else self._assembly.take(frame.header, frame.body)
            if message is not None:
                is_kept = self._call(message, frame)
        except BadFrame as error:
            log.warning("owner_broke_the_protocol", owner=self.name, error=str(error))
            self.close()
        finally:
            if not is_kept:
                frame.release()

    def _call(self, message: Message, frame: Received) -> bool:
        """True when the frame's memory is still needed."""
        head = message.head
        if not isinstance(head, Call):
            raise BadFrame(f"a home sent {type(head).__name__} where calls come")
        # Blocks may be large, and are of no use once written; the arrays of a step live until the next one.
        is_kept = message.is_view and isinstance(head.call, WriteBlocks)
        call = owned(head.call) if message.is_view and not is_kept else head.call
        if isinstance(call, ANSWERED) != bool(head.call_id):
            raise BadFrame(f"{type(call).__name__} with answer id {head.call_id}")
        number = next(self._numbers)
        answer = Answer(partial(self._done, number))
        self._running[number] = _Running(
            head.call_id, answer, frame if is_kept else None, time.perf_counter()
        )
        self._hosting.call(self.name, call, answer)
        return is_kept

    def _done(self, number: int) -> None:
        """Called by the engine's thread."""
        if threading.get_ident() == self._loop_thread:
            self._answer(number)
            return
        with suppress(RuntimeError):  # the loop has ended, and with it the Link
            self._loop.call_soon_threadsafe(self._answer, number)

    def _answer(self, number: int) -> None:
        done = self._running.pop(number)
        if done.frame is not None:
            done.frame.release()
        if not done.call_id:
            return
        self._on_call_done(time.perf_counter() - done.began)
        try:
            self._outgoing.put(Result(call_id=done.call_id, tensor=done.answer.result()))
        except HostLost as error:
            self._outgoing.put(CallFailed(call_id=done.call_id, detail=error.why[:MAX_DETAIL_CHARACTERS]))
