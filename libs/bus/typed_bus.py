"""The bus of `libs.bus.port` over any wire: types become bytes and subjects here, once for all wires."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from libs.bus.codec import check_presence_key, decode, encode, subject_of
from libs.bus.port import (
    BusCounts,
    Message,
    MessageTooLarge,
    NotConnected,
    PresenceEntry,
    Request,
    Subscription,
)
from libs.bus.subscriptions import Answering, Listening, Tally
from libs.bus.wire import LeaseStore, PresenceStore, Wire

Answer = TypeVar("Answer")
M = TypeVar("M", bound=Message)


class TypedBus:
    """Owns its wire and its subscriptions."""

    def __init__(self, wire: Wire, presence: PresenceStore, leases: LeaseStore) -> None:
        self._wire, self._presence, self._leases = wire, presence, leases
        self._tally = Tally()
        self._subscriptions: list[Listening | Answering] = []
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable now."""
        return not self._is_closed and self._wire.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """What the broker accepts in one message."""
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
        """As in `Bus`."""
        subject = subject_of(type(message), to)
        payload = encode(message, subject, self._wire.max_payload_bytes)
        self._check_connected()
        await self._wire.send(subject, payload)

    async def request(self, message: Request[Answer], *, to: str = "", timeout_seconds: float) -> Answer:
        """As in `Bus`."""
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
        """As in `Bus`."""
        self._check_open()
        listening = Listening(message_type, handler, self._tally, self._forget)
        listening.wire = await self._wire.subscribe(
            subject_of(message_type, at), queue_group, listening.take, answers=False
        )
        self._subscriptions.append(listening)
        return listening

    async def serve(
        self,
        request_type: type[Request[Answer]],
        handler: Callable[[Any], Awaitable[Answer]],
        *,
        at: str = "",
        queue_group: str = "",
    ) -> Subscription:
        """As in `Bus`."""
        self._check_open()
        answering = Answering(self._wire, request_type, handler, self._tally, self._forget)
        answering.wire = await self._wire.subscribe(
            subject_of(request_type, at), queue_group, answering.take, answers=True
        )
        self._subscriptions.append(answering)
        return answering

    async def put_presence(self, key: str, value: bytes) -> None:
        """As in `Bus`."""
        check_presence_key(key)
        if len(value) > self._wire.max_payload_bytes:
            raise MessageTooLarge(f"presence of {key}", len(value), self._wire.max_payload_bytes)
        self._check_connected()
        await self._presence.put(key, value)

    async def delete_presence(self, key: str) -> None:
        """As in `Bus`."""
        check_presence_key(key)
        self._check_connected()
        await self._presence.delete(key)

    def watch_presence(self) -> AbstractAsyncContextManager[AsyncIterator[PresenceEntry]]:
        """As in `Bus`."""
        self._check_open()
        return self._presence.watch()

    @property
    def lease_seconds(self) -> float:
        """As in `Bus`."""
        return self._leases.lease_seconds

    async def hold_lease(self, name: str, holder: str) -> bool:
        """As in `Bus`."""
        self._check_lease(name, holder)
        return await self._leases.hold(name, holder)

    async def release_lease(self, name: str, holder: str) -> None:
        """As in `Bus`."""
        self._check_lease(name, holder)
        await self._leases.release(name, holder)

    async def lease_holder(self, name: str) -> str | None:
        """As in `Bus`."""
        self._check_lease(name)
        return await self._leases.holder(name)

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

    def _forget(self, subscription: Listening | Answering) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
