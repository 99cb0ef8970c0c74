"""A host of own modules, reached over two Links: one for calls, one for all else."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import torch

from libs.engine.errors import EngineError, MoveRefused, NoRoom
from libs.engine.hosting.calls import ANSWERED, HostedCall, Settle
from libs.engine.hosting.port import Answer, HostLost
from libs.placement.module import Module
from libs.transport.link_pool import LinkRequests
from libs.transport.port import Link, LinkError, LinkLost, Received
from libs.worker.migration.framing import Assembly, BadFrame, Message, Outgoing
from libs.worker.migration.protocol import (
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
        self._answers: LinkRequests[tuple[Answer, float], HostLost] = LinkRequests()
        """With the time of the call."""
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
        return self._answers.lost

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
        lost, answers = self._answers.lose(HostLost(self.worker, reason))
        self._outgoing.close()
        for answer, _ in answers:
            answer.fail(lost)
        return lost

    async def close(self) -> None:
        """On the Link's loop. Idempotent."""
        self.lose("this side closed the Link")
        await self._link.close()

    def _take_on(self, answer: Answer) -> None:
        """Of a call that nobody answers: it is on its way, or was dropped with all the rest."""
        if self.lost is not None:
            answer.fail(self.lost)
        else:
            answer.give(_NOTHING)

    def _post(self, call: HostedCall, answer: Answer) -> None:
        try:
            call_id = self._answers.add((answer, time.perf_counter())) if isinstance(call, ANSWERED) else 0
        except HostLost as lost:
            answer.fail(lost)
            return
        if not self._outgoing.put(Call(call_id=call_id, call=call)):
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
                if (answer := self._answer(result.call_id)) is not None:
                    answer.give(result.tensor.clone() if message.is_view else result.tensor)
            case CallFailed() as failed:
                if (answer := self._answer(failed.call_id)) is not None:
                    answer.fail(HostLost(self.worker, failed.detail))
            case other:
                raise BadFrame(f"a host sent {type(other).__name__} where answers to calls come")

    def _answer(self, call_id: int) -> Answer | None:
        answer, called_at = self._answers.take(call_id) or (None, 0.0)
        if answer is not None:
            self._on_call_done(time.perf_counter() - called_at)
        return answer


_REFUSALS: dict[RefusalKind, type[EngineError]] = {
    RefusalKind.NO_ROOM: NoRoom,
    RefusalKind.REFUSED: MoveRefused,
}


class RemoteHost:
    """A host (`libs.engine.hosting.port`): `calls` bring calls to it, this Link all else. `call` is for the
    engine's thread, the rest for the loop. Whoever serves it closes it when either Link is lost."""

    def __init__(
        self,
        link: Link,
        calls: HostCalls,
        *,
        fingerprint: str,
        on_leaving: Callable[[], None],
        timeout_seconds: float,
        ping_seconds: float,
    ) -> None:
        self._link, self.calls, self._fingerprint, self._on_leaving = link, calls, fingerprint, on_leaving
        self._timeout_seconds, self._ping_seconds = timeout_seconds, ping_seconds
        self._outgoing = Outgoing(link, timeout_seconds)
        self._asks: LinkRequests[asyncio.Future[Head], HostLost] = LinkRequests()
        self._assembly = Assembly()

    @property
    def worker(self) -> str:
        """See port.Host."""
        return self._link.peer

    @property
    def is_open(self) -> bool:
        """False once it is lost."""
        return self._asks.lost is None

    def call(self, call: HostedCall) -> Answer:
        """See port.Host."""
        return self.calls.call(call)

    async def settle(self) -> None:
        """Returns when everything that was called before is done. Raises HostLost."""
        await self.calls.settle()

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
        with suppress(HostLost):  # nothing is there yet, or the answer tells
            await self.settle()  # calls have a Link of their own, which asks would overtake
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
        await self._ask(
            partial(WeightPiece, move_id=move_id, layer=layer, name=name, first_byte=first_byte, piece=piece)
        )

    async def close_module(self, move_id: str) -> None:
        """Have it freed. Raises HostLost, which frees it as well."""
        with suppress(HostLost):  # a host that is only late gets the order all the same
            await self.settle()  # else what is on its way to the module would find nothing there
        await self._ask(partial(Close, move_id=move_id))

    async def ping(self) -> None:
        """Returns when it said that it is there, however busy its engine is. Raises HostLost."""
        await self._ask(Ping)

    async def serve(self) -> str:
        """Take answers in until the Link is lost or closed, the reason of which is returned."""
        reason = "this worker is closing"
        try:
            async with asyncio.TaskGroup() as tasks:
                pinging = tasks.create_task(self._ping())
                reason = await self._receive()
                pinging.cancel()
        finally:
            self.lose(reason)
            await self._link.close()
        return self._asks.lost.why if self._asks.lost is not None else reason

    async def close(self, reason: str = "this side closed the Link") -> None:
        """Fails what waits; `serve` returns. Idempotent."""
        self.lose(reason)
        await self._link.close()

    def lose(self, reason: str) -> None:
        """Fails what waits, and all later calls. Only the first reason counts."""
        lost, asks = self._asks.lose(HostLost(self.worker, reason))
        self.calls.lose(reason)
        self._outgoing.close()
        for answer in asks:
            if not answer.done():
                answer.set_exception(lost)

    async def _ask(self, head: Callable[..., Head]) -> Head:
        answer: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        ask_id = self._asks.add(answer)
        try:
            self._outgoing.put(head(ask_id=ask_id))
            async with asyncio.timeout(self._timeout_seconds):
                return await answer
        except TimeoutError:
            raise self._silent() from None
        finally:
            self._asks.take(ask_id)

    def _silent(self) -> HostLost:
        return HostLost(self.worker, f"it did not answer within {self._timeout_seconds} s")

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
            case Opened() | Closed() | WeightsAt() | Pong() as done:
                if (answer := self._asks.take(done.ask_id)) is not None and not answer.done():
                    answer.set_result(done)
            case OpenRefused() as refused:
                if (answer := self._asks.take(refused.ask_id)) is not None and not answer.done():
                    answer.set_exception(_REFUSALS[refused.kind](refused.detail))
            case Leaving():
                self._on_leaving()
            case other:
                raise BadFrame(f"a host sent {type(other).__name__}")
