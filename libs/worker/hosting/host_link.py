"""A host at the other end of a Link, as the home's engine and the home's moves see it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NoReturn

import torch

from libs.engine.errors import EngineError, MoveRefused, NoRoom
from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.port import Answer, HostLost
from libs.placement.module import Module
from libs.transport.port import Link, LinkError, Received
from libs.worker.hosting.frames import Assembly, BadFrame, Message
from libs.worker.hosting.host_calls import HostCalls
from libs.worker.hosting.messages import (
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
    WeightPiece,
    WeightsAt,
)
from libs.worker.hosting.outgoing import Outgoing

_REFUSALS: dict[RefusalKind, type[EngineError]] = {
    RefusalKind.NO_ROOM: NoRoom,
    RefusalKind.REFUSED: MoveRefused,
}


class HostLink:
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
        self._ids = count(1)
        self._asks: dict[int, asyncio.Future[Head]] = {}
        self._lost: HostLost | None = None
        self._assembly = Assembly()

    @property
    def worker(self) -> str:
        """See port.Host."""
        return self._link.peer

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
        head = partial(WeightPiece, move_id=move_id, layer=layer, name=name, first_byte=first_byte)
        await self._ask(head, (piece,))

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
        return self._lost.why if self._lost is not None else reason

    async def close(self, reason: str = "this side closed the Link") -> None:
        """Fails what waits; `serve` returns. Idempotent."""
        self.lose(reason)
        await self._link.close()

    def lose(self, reason: str) -> None:
        """Fails what waits, and all later calls. Only the first reason counts."""
        self._lost = self._lost or HostLost(self.worker, reason)
        self.calls.lose(reason)
        self._outgoing.close()
        for ask_id in self._asks:
            self._end_ask(ask_id, None, self._lost)

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
                self._end_ask(done.ask_id, done, None)
            case OpenRefused() as refused:
                self._end_ask(refused.ask_id, None, _REFUSALS[refused.kind](refused.detail))
            case Leaving():
                self._on_leaving()
            case other:
                raise BadFrame(f"a host sent {type(other).__name__}")

    def _end_ask(self, ask_id: int, result: Head | None, error: EngineError | None) -> None:
        ask = self._asks.get(ask_id)
        if ask is None or ask.done():
            return  # given up meanwhile
        if error is not None:
            ask.set_exception(error)
        elif result is not None:
            ask.set_result(result)
