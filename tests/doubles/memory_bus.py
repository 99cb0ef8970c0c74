"""The bus without a broker: several buses on one `MemoryBroker` hear each other."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from memory_broker import MemoryBroker, MemoryConnection, MemorySubscription

from libs.bus.port import BusError, NoResponders, NotConnected, PresenceEntry
from libs.bus.presence_watch import PresenceWatch
from libs.bus.typed_bus import TypedBus
from libs.bus.wire import OnPayload


class MemoryWire:
    """A `Wire`."""

    def __init__(self, broker: MemoryBroker, connection: MemoryConnection) -> None:
        self._broker, self._connection = broker, connection
        self._subscriptions: set[MemorySubscription] = set()

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable now."""
        return self._connection.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """What the broker accepts in one message."""
        return self._broker.max_payload_bytes

    @property
    def num_reconnects_total(self) -> int:
        """How often the broker came back."""
        return self._connection.num_reconnects_total

    @property
    def num_dropped_total(self) -> int:
        """Payloads lost because a subscription was full."""
        return self._connection.num_dropped_total

    @property
    def num_open_requests(self) -> int:
        """Asked and not yet answered."""
        return len(self._connection.requests)

    async def send(self, subject: str, payload: bytes) -> None:
        """As in `Wire`. Lets receivers run, as a socket would."""
        self._check_connected()
        self._broker.route(subject, payload)
        await asyncio.sleep(0)

    async def ask(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        """As in `Wire`."""
        self._check_connected()
        return await self._connection.requests.wait(
            f"no answer on {subject}", timeout_seconds, partial(self._route, subject, payload)
        )

    async def _route(self, subject: str, payload: bytes, reply: str) -> None:
        if not self._broker.route(subject, payload, reply):
            raise NoResponders(f"nobody serves {subject}")

    async def answer(self, reply: str, payload: bytes) -> None:
        """As in `Wire`."""
        self._check_connected()
        self._broker.answer(reply, payload)

    async def refuse(self, reply: str, error: BusError) -> None:
        """As in `Wire`."""
        self._check_connected()
        self._broker.refuse(reply, error)

    async def subscribe(
        self, subject: str, queue_group: str, on_payload: OnPayload, *, answers: bool
    ) -> MemorySubscription:
        """As in `Wire`."""
        subscription = MemorySubscription(
            self._broker, self._connection, subject, queue_group, on_payload, answers=answers
        )
        self._subscriptions.add(subscription)
        subscription.task.add_done_callback(lambda _: self._subscriptions.discard(subscription))
        self._broker.add(subscription)
        return subscription

    async def close(self) -> None:
        """As in `Wire`."""
        self._broker.leave(self._connection)
        for subscription in list(self._subscriptions):
            self._broker.remove(subscription)
            subscription.task.cancel()
        await asyncio.gather(*(s.task for s in list(self._subscriptions)), return_exceptions=True)

    def _check_connected(self) -> None:
        if not self._connection.is_connected:
            raise NotConnected("the broker is away")


class MemoryPresence:
    """A `PresenceStore`."""

    def __init__(self, broker: MemoryBroker, connection: MemoryConnection) -> None:
        self._broker, self._connection = broker, connection

    async def put(self, key: str, value: bytes) -> None:
        """As in `Bus`."""
        self._broker.put_presence(key, value)

    async def delete(self, key: str) -> None:
        """As in `Bus`."""
        self._broker.delete_presence(key)

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[PresenceEntry]]:
        """As in `Bus`."""
        watch = PresenceWatch()
        self._connection.watches.add(watch)
        if self._connection.is_connected:
            self._broker.fill(watch)
        try:
            yield watch
        finally:
            self._connection.watches.discard(watch)

    def close(self) -> None:
        """As in `PresenceStore`."""
        for watch in self._connection.watches:
            watch.end()


class MemoryLeases:
    """A `LeaseStore`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self.lease_seconds = broker.lease_seconds

    async def hold(self, name: str, holder: str) -> bool:
        """As in `Bus`."""
        return self._broker.hold_lease(name, holder)

    async def release(self, name: str, holder: str) -> None:
        """As in `Bus`."""
        if self._broker.lease_holder(name) == holder:
            self._broker.drop_lease(name)

    async def holder(self, name: str) -> str | None:
        """As in `Bus`."""
        return self._broker.lease_holder(name)


class MemoryBus(TypedBus):
    """One process's bus on `broker`. `disconnect` and `reconnect` play a broken connection."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker, self._connection = broker, broker.connect()
        super().__init__(
            MemoryWire(broker, self._connection),
            MemoryPresence(broker, self._connection),
            MemoryLeases(broker),
        )

    def disconnect(self) -> None:
        """This bus alone loses the broker."""
        self._broker.disconnect(self._connection)

    def reconnect(self) -> None:
        """It finds the broker again."""
        self._broker.reconnect(self._connection)
