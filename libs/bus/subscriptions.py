"""What becomes of a payload that came in: a call of a handler, or an answer."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog

from libs.bus.codec import decode, encode
from libs.bus.port import BusError, HandlerFailed, Message, NoResponders, Undecodable
from libs.bus.wire import Wire, WireSubscription

MAX_RUNNING_HANDLERS = 256

log = structlog.get_logger()


@dataclass
class Tally:
    """Counted over all subscriptions of a bus."""

    num_undecodable_total: int = 0
    num_handlers_failed_total: int = 0
    num_running_handlers: int = 0


class Listening:
    """A subscription to messages; the handler runs in the subscription's own task, one message after the
    other."""

    def __init__(
        self,
        kind: type[Message],
        handler: Callable[[Any], Awaitable[None] | None],
        tally: Tally,
        on_closed: Callable[["Listening"], None],
    ) -> None:
        self._kind, self._handler, self._tally, self._on_closed = kind, handler, tally, on_closed
        self._is_closed = False
        self.wire: WireSubscription

    def take(self, payload: bytes, _reply: str) -> Awaitable[None] | None:
        """A plain handler has done its work on return: no task, no coroutine."""
        if self._is_closed:
            return None
        try:
            message = decode(payload, self._kind)
        except Undecodable as error:
            self._tally.num_undecodable_total += 1
            log.warning("message_undecodable", subject=self._kind.subject, error=str(error))
            return None
        try:
            outcome = self._handler(message)
        except Exception:
            self._tally.num_handlers_failed_total += 1
            log.exception("message_handler_failed", subject=self._kind.subject)
            return None
        return None if outcome is None else self._finish(outcome)

    async def _finish(self, outcome: Awaitable[None]) -> None:
        try:
            await outcome
        except Exception:
            self._tally.num_handlers_failed_total += 1
            log.exception("message_handler_failed", subject=self._kind.subject)

    async def close(self) -> None:
        """As in `Subscription`."""
        self._is_closed = True
        await self.wire.close()
        self._on_closed(self)

    async def abandon(self) -> None:
        """Nothing runs outside the subscription's own task."""
        self._is_closed = True


class Answering:
    """A subscription to requests; each handler is a task of its own."""

    def __init__(
        self,
        wire: Wire,
        kind: type[Message],
        handler: Callable[[Any], Awaitable[Any]],
        tally: Tally,
        on_closed: Callable[["Answering"], None],
        max_running: int = MAX_RUNNING_HANDLERS,
    ) -> None:
        self._bus_wire, self._kind, self._handler = wire, kind, handler
        self._tally, self._on_closed = tally, on_closed
        self._free = asyncio.Semaphore(max_running)
        self._running: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.wire: WireSubscription

    async def take(self, payload: bytes, reply: str) -> None:
        """Waits while too many handlers run; meanwhile the subscription fills up."""
        if not self._is_closed:
            await self._free.acquire()
        if self._is_closed:
            await self._refuse(reply, NoResponders(f"{self._kind.__name__} is no longer served here"))
            return
        task = asyncio.create_task(self._answer(payload, reply), name=f"answer-{self._kind.__name__}")
        self._running.add(task)
        self._tally.num_running_handlers += 1
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._tally.num_running_handlers -= 1
        self._free.release()
        if not task.cancelled() and (error := task.exception()):
            log.error("answering_crashed", request=self._kind.__name__, exc_info=error)

    async def _answer(self, payload: bytes, reply: str) -> None:
        name = self._kind.__name__
        try:
            request = decode(payload, self._kind)
        except Undecodable as error:
            self._tally.num_undecodable_total += 1
            log.warning("request_undecodable", request=name, error=str(error))
            await self._refuse(reply, error)
            return
        try:
            answer = encode(
                await self._handler(request), f"the answer to {name}", self._bus_wire.max_payload_bytes
            )
        except asyncio.CancelledError:
            await self._refuse(reply, HandlerFailed(f"{name}: its handler was cancelled"))
            raise
        except Exception as error:
            self._tally.num_handlers_failed_total += 1
            log.exception("request_handler_failed", request=name)
            await self._refuse(reply, HandlerFailed(f"{name}: {type(error).__name__}: {error}"))
            return
        try:
            await self._bus_wire.answer(reply, answer)
        except BusError as error:
            log.info("answer_not_sent", request=name, error=str(error))

    async def _refuse(self, reply: str, error: BusError) -> None:
        try:
            await self._bus_wire.refuse(reply, error)
        except BusError as refusal_error:
            log.info("answer_not_sent", request=self._kind.__name__, error=str(refusal_error))

    async def close(self) -> None:
        """As in `Subscription`."""
        self._is_closed = True
        await self.wire.close()
        if others := self._running - {asyncio.current_task()}:
            await asyncio.wait(others)
        self._on_closed(self)

    async def abandon(self) -> None:
        """Cancel the handlers in progress; their askers are told."""
        self._is_closed = True
        others = self._running - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
