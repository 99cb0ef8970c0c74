"""The bus without a broker: several buses on one `MemoryBroker` hear each other."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from memory_broker import MemoryBroker, MemoryConnection, MemorySubscription, Shelf

from libs.bus.bus import Bus
from libs.bus.errors import BusError, NoResponders, NotConnected
from libs.bus.message import PresenceEntry
from libs.bus.presence_watch import PresenceWatch
from libs.bus.wire import OnPayload, Stored


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


class MemoryBucket:
    """A `Bucket`; that of presence is watched."""

    def __init__(self, broker: MemoryBroker, connection: MemoryConnection, shelf: Shelf) -> None:
        self._broker, self._connection, self._shelf = broker, connection, shelf
        self.ttl_seconds = shelf.ttl_seconds

    async def put(self, key: str, value: bytes) -> None:
        self._shelf.put(key, value)
        self._announce(key, value)

    async def delete(self, key: str, revision: int | None = None) -> bool:
        if revision is not None and self._shelf.get(key).revision != revision:
            return False
        self._shelf.remove(key)
        self._announce(key, None)
        return True

    async def get(self, key: str) -> Stored:
        return self._shelf.get(key)

    async def replace(self, key: str, value: bytes, revision: int) -> bool:
        if self._shelf.get(key).revision != revision:
            return False
        await self.put(key, value)
        return True

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[PresenceEntry]]:
        watch = PresenceWatch()
        self._connection.watches.add(watch)
        if self._connection.is_connected:
            self._broker.fill(watch)
        try:
            yield watch
        finally:
            self._connection.watches.discard(watch)

    def close(self) -> None:
        for watch in self._connection.watches:
            watch.end()

    def _announce(self, key: str, value: bytes | None) -> None:
        if self._shelf is self._broker.presence:
            self._broker.announce(key, value)


class MemoryBus(Bus):
    """One process's bus on `broker`. `disconnect` and `reconnect` play a broken connection."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker, self._connection = broker, broker.connect()
        super().__init__(
            MemoryWire(broker, self._connection),
            MemoryBucket(broker, self._connection, broker.presence),
            MemoryBucket(broker, self._connection, broker.leases),
        )

    def disconnect(self) -> None:
        """This bus alone loses the broker."""
        self._broker.disconnect(self._connection)

    def reconnect(self) -> None:
        """It finds the broker again."""
        self._broker.reconnect(self._connection)
