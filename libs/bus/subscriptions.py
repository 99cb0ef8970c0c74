"""Subscriptions: a payload that came in becomes a call of a handler, or an answer."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from libs.bus.errors import BusError, HandlerFailed, NoResponders, Undecodable
from libs.bus.message import Message, decode, encode
from libs.bus.wire import Wire, WireSubscription

MAX_RUNNING_HANDLERS = 256

log = structlog.get_logger()


@dataclass
class Tally:
    """Counted over all subscriptions of a bus."""

    num_undecodable_total: int = 0
    num_handlers_failed_total: int = 0
    num_running_handlers: int = 0


@dataclass(eq=False)
class Subscription(ABC):
    """A live subscription; survives reconnects."""

    _bus_wire: Wire
    kind: type[Message]
    _handler: Callable[[Any], Any]
    _tally: Tally
    _on_closed: Callable[["Subscription"], None]
    wire: WireSubscription = field(init=False)
    _is_closed: bool = field(default=False, init=False)
    _running: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]], init=False)

    @abstractmethod
    def take(self, payload: bytes, reply: str) -> Awaitable[None] | None:
        """Handle a payload."""

    async def close(self) -> None:
        """Take no more messages, then wait for the handlers in progress. Idempotent.

        Called by a handler of this very subscription, it does not wait. Requests that no handler has begun
        are answered with `NoResponders`.
        """
        self._is_closed = True
        await self.wire.close()
        if others := self._running - {asyncio.current_task()}:
            await asyncio.wait(others)
        self._on_closed(self)

    async def abandon(self) -> None:
        """Take no more messages, and cancel the handlers in progress; their askers get `HandlerFailed`."""
        self._is_closed = True
        others = self._running - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


class MessageSubscription(Subscription):
    """A subscription to messages; the handler runs in the wire's own task, one message after the other."""

    def take(self, payload: bytes, reply: str) -> Awaitable[None] | None:
        """A plain handler has done its work on return: no task, no coroutine."""
        if self._is_closed:
            return None
        try:
            message = decode(payload, self.kind)
        except Undecodable as error:
            self._tally.num_undecodable_total += 1
            log.warning("message_undecodable", subject=self.kind.subject, error=str(error))
            return None
        try:
            outcome = self._handler(message)
        except Exception:
            self._tally.num_handlers_failed_total += 1
            log.exception("message_handler_failed", subject=self.kind.subject)
            return None
        return None if outcome is None else self._finish(outcome)

    async def _finish(self, outcome: Awaitable[None]) -> None:
        try:
            await outcome
        except Exception:
            self._tally.num_handlers_failed_total += 1
            log.exception("message_handler_failed", subject=self.kind.subject)


@dataclass(eq=False)
class RequestSubscription(Subscription):
    """A subscription to requests; each handler is a task of its own."""

    _free: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_RUNNING_HANDLERS), init=False
    )

    async def take(self, payload: bytes, reply: str) -> None:
        """Waits while too many handlers run; meanwhile the subscription fills up."""
        if not self._is_closed:
            await self._free.acquire()
        if self._is_closed:
            await self._refuse(reply, NoResponders(f"{self.kind.__name__} is no longer served here"))
            return
        task = asyncio.create_task(self._answer(payload, reply), name=f"answer-{self.kind.__name__}")
        self._running.add(task)
        self._tally.num_running_handlers += 1
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._tally.num_running_handlers -= 1
        self._free.release()
        if not task.cancelled() and (error := task.exception()):
            log.error("answering_crashed", request=self.kind.__name__, exc_info=error)

    async def _answer(self, payload: bytes, reply: str) -> None:
        name = self.kind.__name__
        try:
            request = decode(payload, self.kind)
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
            log.info("answer_not_sent", request=self.kind.__name__, error=str(refusal_error))
