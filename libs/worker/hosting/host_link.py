"""A host at the other end of a Link, as the home's engine and the home's moves see it."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NoReturn

import torch

from libs.engine.errors import EngineError, MoveRefused, NoRoom
from libs.engine.hosting.calls import ANSWERED, HostedCall, Settle
from libs.engine.hosting.port import Answer, HostLost
from libs.placement.module import Module
from libs.transport.port import Link, LinkError, Received
from libs.worker.hosting.call_codec import split_call
from libs.worker.hosting.frames import Assembly, BadFrame, Message
from libs.worker.hosting.messages import (
    Call,
    CallFailed,
    Close,
    Closed,
    Head,
    Leaving,
    Open,
    Opened,
    OpenRefused,
    Ping,
    Pong,
    RefusalKind,
    Result,
    WeightPiece,
    WeightsAt,
)
from libs.worker.hosting.outgoing import Outgoing

MAX_UNSENT_BYTES = 64 << 20
"""While more than this is unsent, calls that nobody answers are done only when it is less."""

_NOTHING = torch.empty(0)
_REFUSALS: dict[RefusalKind, type[EngineError]] = {
    RefusalKind.NO_ROOM: NoRoom,
    RefusalKind.REFUSED: MoveRefused,
}


class HostLink:
    """A Host (`libs.engine.hosting.port`) over a Link. `call` is for the engine's thread, the rest for the
    loop; `serve` runs as long as the Link does. `on_call_done` hears how long an answer took."""

    def __init__(
        self,
        link: Link,
        *,
        fingerprint: str,
        wake: Callable[[], None],
        on_call_done: Callable[[float], None],
        on_leaving: Callable[[], None],
        timeout_seconds: float,
        ping_seconds: float,
    ) -> None:
        self._link, self._fingerprint = link, fingerprint
        self._wake, self._on_call_done, self._on_leaving = wake, on_call_done, on_leaving
        self._timeout_seconds, self._ping_seconds = timeout_seconds, ping_seconds
        self._outgoing = Outgoing(MAX_UNSENT_BYTES)
        self._ids = count(1)
        self._lock = threading.Lock()
        self._answers: dict[int, tuple[Answer, float]] = {}
        """By call, with the time of the call."""
        self._asks: dict[int, asyncio.Future[Head]] = {}
        self._lost: HostLost | None = None
        self._assembly = Assembly()

    @property
    def worker(self) -> str:
        """See port.Host."""
        return self._link.peer

    @property
    def is_open(self) -> bool:
        """False once it is lost or closed."""
        return self._lost is None

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
            loop.call_soon_threadsafe(settled.set)

        answer = Answer(wake)
        self._post(Settle(), answer)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await settled.wait()
        except TimeoutError:
            raise self._silent() from None
        answer.result()

    async def open(
        self,
        move_id: str,
        module: Module,
        *,
        num_blocks_wanted: int,
        num_blocks_least: int,
        has_weights: bool,
    ) -> int:
        """Blocks granted for a module, which is empty then. Raises NoRoom, MoveRefused, HostLost."""
        opened = await self._ask(
            partial(
                Open,
                move_id=move_id,
                module=module,
                fingerprint=self._fingerprint,
                num_blocks_wanted=num_blocks_wanted,
                num_blocks_least=num_blocks_least,
                has_weights=has_weights,
            )
        )
        return opened.num_blocks if isinstance(opened, Opened) else 0

    async def send_weights(
        self, move_id: str, layer: int, name: str, first_byte: int, piece: torch.Tensor
    ) -> None:
        """A part of a tensor (`libs.model.layer_weights`) of an open module that was promised its weights.

        `piece` are its bytes from `first_byte` on. Raises MoveRefused, HostLost.
        """
        head = partial(WeightPiece, move_id=move_id, layer=layer, name=name, first_byte=first_byte)
        await self._ask(head, (piece,))

    async def close_module(self, move_id: str) -> None:
        """Have it freed. Raises HostLost, which frees it as well."""
        await self._ask(partial(Close, move_id=move_id))

    async def ping(self) -> None:
        """Returns when it said that it is there, however busy its engine is. Raises HostLost."""
        await self._ask(Ping)

    async def serve(self) -> str:
        """Take answers in until the Link is lost, whose reason is returned."""
        reason = "this worker is closing"
        try:
            async with asyncio.TaskGroup() as tasks:
                aside = (tasks.create_task(self._send()), tasks.create_task(self._ping()))
                reason = await self._receive()
                for task in aside:
                    task.cancel()
        finally:
            self._lose(reason)
            await self._link.close()
        return reason

    async def close(self) -> None:
        """Fails what waits; `serve` returns. Idempotent."""
        self._lose("this side closed the Link")
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
        self._outgoing.put(Call(call_id=call_id, facts=facts), tensors)

    async def _ask(self, head: Callable[..., Head], tensors: Sequence[torch.Tensor] = ()) -> Head:
        if self._lost is not None:
            raise self._lost
        ask_id = next(self._ids)
        answer: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._asks[ask_id] = answer
        try:
            self._outgoing.put(head(ask_id=ask_id), tensors)
            async with asyncio.timeout(self._timeout_seconds):
                return await answer
        except TimeoutError:
            raise self._silent() from None
        finally:
            del self._asks[ask_id]

    def _silent(self) -> HostLost:
        return HostLost(self.worker, f"it did not answer within {self._timeout_seconds} s")

    async def _send(self) -> None:
        with suppress(LinkError):  # the Link is lost then, and `receive` says why
            await self._outgoing.send_all(self._link, self._timeout_seconds)

    async def _ping(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._ping_seconds)
            self._outgoing.put(Ping())

    async def _receive(self) -> str:
        while True:
            try:
                frame = await self._link.receive()
                self._take(frame)
            except (LinkError, BadFrame) as ended:
                return str(ended)

    def _take(self, frame: Received) -> None:
        try:
            message = self._assembly.take(frame.header, frame.body)
            if message is not None:
                self._handle(message)
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
            case Opened() | Closed() | WeightsAt() | Pong() as done:
                self._end_ask(done.ask_id, done, None)
            case OpenRefused() as refused:
                self._end_ask(refused.ask_id, None, _REFUSALS[refused.kind](refused.detail))
            case Leaving():
                self._on_leaving()
            case other:
                raise BadFrame(f"a host sent {type(other).__name__}")

    def _answer(self, call_id: int) -> Answer | None:
        with self._lock:
            answer, called_at = self._answers.pop(call_id, (None, 0.0))
        if answer is not None:
            self._on_call_done(time.perf_counter() - called_at)
        return answer

    def _end_ask(self, ask_id: int, result: Head | None, error: EngineError | None) -> None:
        ask = self._asks.get(ask_id)
        if ask is None or ask.done():
            return  # given up meanwhile
        if error is not None:
            ask.set_exception(error)
        elif result is not None:
            ask.set_result(result)

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._lost = lost = self._lost or HostLost(self.worker, reason)
            answers, self._answers = self._answers, {}
        self._outgoing.close()
        for answer, _ in answers.values():
            answer.fail(lost)
        for ask_id in self._asks:
            self._end_ask(ask_id, None, lost)
