"""The bus: typed messages, presence and leases over a wire.

A message type knows its subject (`Message.subject`, with `{to}` for the incarnation it is addressed to) and,
if it asks something, its answer (`Request[Answer]`). Delivery is at most once; a request is what gets an
answer.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from libs.bus.errors import MessageTooLarge, NotConnected
from libs.bus.message import (
    Answer,
    Message,
    PresenceEntry,
    Request,
    check_presence_key,
    decode,
    encode,
    subject_of,
)
from libs.bus.subscriptions import MessageSubscription, RequestSubscription, Subscription, Tally
from libs.bus.wire import Bucket, Wire

M = TypeVar("M", bound=Message)

PRESENCE_TTL_SECONDS = 3.0
LEASE_SECONDS = 3.0
"""How long a lease lasts after it was renewed last."""


class BusCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one bus since its start (`num_*_total`), and how full it is now."""

    num_reconnects_total: int
    num_dropped_total: int
    """Messages that came in faster than their subscription took them."""
    num_undecodable_total: int
    num_handlers_failed_total: int
    num_waiting_messages: int
    """Received, and not yet taken by a handler."""
    num_open_requests: int
    """Asked here, and not yet answered."""
    num_running_handlers: int
    """Requests being answered here."""


class Bus:
    """Publish, request, presence and leases, typed by the messages. Owns its wire and its subscriptions."""

    def __init__(self, wire: Wire, presence: Bucket, leases: Bucket) -> None:
        self._wire, self._presence, self._leases = wire, presence, leases
        self._tally = Tally()
        self._subscriptions: list[Subscription] = []
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable now."""
        return not self._is_closed and self._wire.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """The most that the broker accepts in one message."""
        return self._wire.max_payload_bytes

    @property
    def counts(self) -> BusCounts:
        """Figures for metrics; cheap."""
        return BusCounts(
            num_reconnects_total=self._wire.num_reconnects_total,
            num_dropped_total=self._wire.num_dropped_total,
            num_undecodable_total=self._tally.num_undecodable_total,
            num_handlers_failed_total=self._tally.num_handlers_failed_total,
            num_waiting_messages=sum(s.wire.num_waiting for s in self._subscriptions),
            num_open_requests=self._wire.num_open_requests,
            num_running_handlers=self._tally.num_running_handlers,
        )

    async def publish(self, message: Message, *, to: str = "") -> None:
        """Send without an answer. Raises MessageTooLarge, NotConnected or Overloaded, never blocks for long.

        `to` fills `{to}` in the message's subject: letters, digits, `-` and `_`. ValueError if it does not
        fit.
        """
        subject = subject_of(type(message), to)
        payload = encode(message, subject, self._wire.max_payload_bytes)
        self._check_connected()
        await self._wire.send(subject, payload)

    async def request(self, message: Request[Answer], *, to: str = "", timeout_seconds: float) -> Answer:
        """Send and wait for the answer. Raises any BusError; all but RequestTimedOut come without waiting
        for the timeout."""
        subject = subject_of(type(message), to)
        payload = encode(message, subject, self._wire.max_payload_bytes)
        self._check_connected()
        answer: Answer = decode(await self._wire.ask(subject, payload, timeout_seconds), message.answer)
        return answer

    async def subscribe(
        self,
        message_type: type[M],
        handler: Callable[[M], Awaitable[None] | None],
        *,
        at: str = "",
        queue_group: str = "",
    ) -> Subscription:
        """Call `handler` for each message in order. A handler that is not a coroutine function is called
        directly (token frames: no task per message). Its exceptions are logged and do not end the
        subscription. Undecodable messages are counted and logged."""
        subscription = MessageSubscription(self._wire, message_type, handler, self._tally, self._forget)
        return await self._begin(subscription, at, queue_group, answers=False)

    async def serve(
        self,
        request_type: type[Request[Answer]],
        handler: Callable[[Any], Awaitable[Answer]],
        *,
        at: str = "",
        queue_group: str = "",
    ) -> Subscription:
        """Answer requests; each handler runs as a task of its own, so a slow one delays nobody. At most 256
        run at once, further requests wait, and when too many wait the asker gets `Overloaded`. A handler
        that raises leaves the asker with an immediate `HandlerFailed`."""
        subscription = RequestSubscription(self._wire, request_type, handler, self._tally, self._forget)
        return await self._begin(subscription, at, queue_group, answers=True)

    async def put_presence(self, key: str, value: bytes) -> None:
        """Write a key that disappears by itself `presence_ttl_seconds` after its last put. Keys:
        [A-Za-z0-9_-.].

        Raises NotConnected at once, RequestTimedOut or PresenceUnavailable; putting again repairs
        everything."""
        check_presence_key(key)
        if len(value) > self._wire.max_payload_bytes:
            raise MessageTooLarge(f"presence of {key}", len(value), self._wire.max_payload_bytes)
        self._check_connected()
        await self._presence.put(key, value)

    async def delete_presence(self, key: str) -> None:
        """Remove a key now."""
        check_presence_key(key)
        self._check_connected()
        await self._presence.delete(key)

    def watch_presence(self) -> AbstractAsyncContextManager[AsyncIterator[PresenceEntry]]:
        """All keys as they are, then every put and delete. Expiry may pass unannounced: a watcher keeps its
        own clock. Goes on through broker restarts, also when the broker comes back empty, and repeats all
        keys after each. Keys that were lost meanwhile are not announced: they expire. A slow watcher gets
        only the latest of each key. Ends with StopAsyncIteration when the bus is closed."""
        self._check_open()
        return self._presence.watch()

    @property
    def lease_seconds(self) -> float:
        """How long a lease lasts after it was renewed last."""
        return self._leases.ttl_seconds

    async def hold_lease(self, name: str, holder: str) -> bool:
        """Take a free lease, or renew one's own. True: `holder` has it from now on for `lease_seconds`. Of
        several who ask at once, one has it. Names and holders: as presence keys.

        It is worth what the broker remembers: one that comes back empty gives it to whoever asks first, so a
        holder that lost the broker has it no more until it holds it again. Raises NotConnected at once,
        RequestTimedOut or PresenceUnavailable: whether it was taken is not known then."""
        self._check_lease(name, holder)
        current = await self._leases.get(name)
        if current.value not in (None, holder.encode()):
            return False
        return await self._leases.replace(name, holder.encode(), current.revision)

    async def release_lease(self, name: str, holder: str) -> None:
        """Free a lease, where `holder` has it. Raises as `hold_lease`."""
        self._check_lease(name, holder)
        current = await self._leases.get(name)
        if current.value == holder.encode():
            await self._leases.delete(name, current.revision)

    async def lease_holder(self, name: str) -> str | None:
        """The present holder. Raises as `hold_lease`."""
        self._check_lease(name)
        value = (await self._leases.get(name)).value
        return None if value is None else value.decode()

    async def close(self) -> None:
        """Cancel the handlers in progress and tell their askers, send what waits, disconnect. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._presence.close()
        for subscription in list(self._subscriptions):
            await subscription.abandon()
        self._subscriptions.clear()
        await self._wire.close()

    async def _begin(
        self, subscription: Subscription, at: str, queue_group: str, *, answers: bool
    ) -> Subscription:
        self._check_open()
        subject = subject_of(subscription.kind, at)
        subscription.wire = await self._wire.subscribe(
            subject, queue_group, subscription.take, answers=answers
        )
        self._subscriptions.append(subscription)
        return subscription

    def _check_lease(self, *words: str) -> None:
        for word in words:
            check_presence_key(word)
        self._check_connected()

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotConnected("this bus is closed")

    def _check_connected(self) -> None:
        self._check_open()
        if not self._wire.is_connected:
            raise NotConnected("the broker is away")

    def _forget(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
