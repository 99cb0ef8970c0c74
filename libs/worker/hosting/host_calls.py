"""Calls to a host over a Link of their own."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import torch

from libs.engine.hosting.calls import ANSWERED, HostedCall, Settle
from libs.engine.hosting.port import Answer, HostLost
from libs.transport.port import Link, LinkLost, Received
from libs.worker.hosting.call_codec import split_call
from libs.worker.hosting.frames import Assembly, BadFrame, Message
from libs.worker.hosting.messages import Call, CallFailed, Result
from libs.worker.hosting.outgoing import Outgoing

MAX_UNSENT_BYTES = 64 << 20
"""While more than this is unsent, calls that nobody answers are done only when it is less."""

_NOTHING = torch.empty(0)


class HostCalls:
    """A Host (`libs.engine.hosting.port`). Made on the Link's loop; `call` is for any thread, and fastest on
    the loop's own. `wake` is called with each answer, `on_call_done` hears how long it took, `on_lost` why
    the Link is over, on its loop."""

    def __init__(
        self,
        link: Link,
        *,
        wake: Callable[[], None],
        on_call_done: Callable[[float], None],
        on_lost: "Callable[[HostCalls, str], None]",
        timeout_seconds: float,
    ) -> None:
        self._link, self._wake, self._on_call_done, self._on_lost = link, wake, on_call_done, on_lost
        self._timeout_seconds = timeout_seconds
        self._outgoing = Outgoing(link, timeout_seconds, MAX_UNSENT_BYTES)
        self._ids = count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, tuple[Answer, float]] = {}
        """By call, with the time of the call."""
        self._lost: HostLost | None = None
        self._assembly = Assembly()
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None
        link.deliver(self._take, self._link_lost)

    @property
    def worker(self) -> str:
        """See port.Host."""
        return self._link.peer

    @property
    def lost(self) -> HostLost | None:
        """Why no call is done any more."""
        return self._lost

    def call(self, call: HostedCall) -> Answer:
        """See port.Host."""
        answer = Answer(self._wake)
        self._post(call, answer)
        if not isinstance(call, ANSWERED):
            self._outgoing.when_room(partial(self._take_on, answer))
        return answer

    async def settle(self) -> None:
        """Returns when everything that was called before is done. Raises HostLost."""
        loop, settled = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(settled.set)

        answer = Answer(wake)
        self._post(Settle(), answer)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await settled.wait()
        except TimeoutError:
            raise HostLost(self.worker, f"it did not answer within {self._timeout_seconds} s") from None
        answer.result()

    def lose(self, reason: str) -> HostLost:
        """Fails what waits, and all later calls, with what is returned: the first reason counts. From any
        thread."""
        with self._lock:
            self._lost = lost = self._lost or HostLost(self.worker, reason)
            answers, self._answers = self._answers, {}
        self._outgoing.close()
        for answer, _ in answers.values():
            answer.fail(lost)
        return lost

    async def close(self) -> None:
        """On the Link's loop. Idempotent."""
        self.lose("this side closed the Link")
        await self._link.close()

    def _take_on(self, answer: Answer) -> None:
        """Of a call that nobody answers: it is on its way, or was dropped with all the rest."""
        if self._lost is not None:
            answer.fail(self._lost)
        else:
            answer.give(_NOTHING)

    def _post(self, call: HostedCall, answer: Answer) -> None:
        facts, tensors = split_call(call)
        with self._lock:
            if self._lost is not None:
                answer.fail(self._lost)
                return
            call_id = 0
            if isinstance(call, ANSWERED):
                call_id = next(self._ids)
                self._answers[call_id] = answer, time.perf_counter()
        if not self._outgoing.put(Call(call_id=call_id, facts=facts), tensors):
            answer.fail(self.lose("nothing can be sent to it any more"))

    def _link_lost(self, error: LinkLost) -> None:
        self._on_lost(self, self.lose(str(error)).why)

    def _take(self, frame: Received) -> None:
        try:
            message = None if self._closing else self._assembly.take(frame.header, frame.body)
            if message is not None:
                self._handle(message)
        except BadFrame as error:
            self.lose(str(error))
            self._closing = self._loop.create_task(self._link.close())
        finally:
            frame.release()

    def _handle(self, message: Message) -> None:
        match message.head:
            case Result() as result:
                if len(message.tensors) != 1:
                    raise BadFrame(f"a result of {len(message.tensors)} tensors")
                if (answer := self._answer(result.call_id)) is not None:
                    answer.give(*message.owned())
            case CallFailed() as failed:
                if (answer := self._answer(failed.call_id)) is not None:
                    answer.fail(HostLost(self.worker, failed.detail))
            case other:
                raise BadFrame(f"a host sent {type(other).__name__} where answers to calls come")

    def _answer(self, call_id: int) -> Answer | None:
        with self._lock:
            answer, called_at = self._answers.pop(call_id, (None, 0.0))
        if answer is not None:
            self._on_call_done(time.perf_counter() - called_at)
        return answer
