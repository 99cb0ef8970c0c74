"""A broker inside the process, with the limits of a real one. The other end of `memory_bus`."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from libs.bus.bus import LEASE_SECONDS
from libs.bus.errors import BusError, NotConnected, Overloaded
from libs.bus.open_requests import OpenRequests
from libs.bus.presence_watch import PresenceWatch
from libs.bus.wire import LOST_IN_FLIGHT, MAX_WAITING_MESSAGES, MAX_WAITING_REQUESTS, OnPayload, Stored

MAX_PAYLOAD_BYTES = 2**20
PRESENCE_TTL_SECONDS = 3.0

NOTHING = Stored(None, 0)

_connection_numbers = itertools.count()


class MemoryConnection:
    """What the broker knows of one bus."""

    def __init__(self) -> None:
        self.is_connected = True
        self.num_reconnects_total = 0
        self.num_dropped_total = 0
        self.requests = OpenRequests[bytes](f"reply-{next(_connection_numbers)}-")
        self.watches: set[PresenceWatch] = set()
        """Of presence; leases have none."""


class MemorySubscription:
    """A `WireSubscription`: a bounded queue, and a task that hands over."""

    def __init__(
        self,
        broker: "MemoryBroker",
        connection: MemoryConnection,
        subject: str,
        queue_group: str,
        on_payload: OnPayload,
        *,
        answers: bool,
    ) -> None:
        self._broker, self.connection = broker, connection
        self.subject, self.queue_group, self.answers = subject, queue_group, answers
        self._on_payload = on_payload
        limit = MAX_WAITING_REQUESTS if answers else MAX_WAITING_MESSAGES
        self._queue: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue(limit)
        self.task = asyncio.create_task(self._hand_over(), name=f"memory-{subject}")

    @property
    def num_waiting(self) -> int:
        """Payloads received and not yet handed over."""
        return self._queue.qsize()

    def offer(self, payload: bytes, reply: str) -> None:
        """Take it in, or drop it when full."""
        try:
            self._queue.put_nowait((payload, reply))
        except asyncio.QueueFull:
            self.connection.num_dropped_total += 1
            if self.answers and reply:
                self._broker.refuse(reply, Overloaded(f"too many requests wait on {self.subject}"))

    async def close(self) -> None:
        """As in `WireSubscription`."""
        self._broker.remove(self)
        if asyncio.current_task() is self.task:
            return
        joining = asyncio.ensure_future(self._queue.join())
        await asyncio.wait({joining, self.task}, return_when=asyncio.FIRST_COMPLETED)
        joining.cancel()
        self.task.cancel()
        await asyncio.gather(joining, self.task, return_exceptions=True)

    async def _hand_over(self) -> None:
        while True:
            payload, reply = await self._queue.get()
            try:
                outcome = self._on_payload(payload, reply)
                if outcome is not None:
                    await outcome
            finally:
                self._queue.task_done()


class Shelf:
    """Values that expire `ttl_seconds` after they were stored."""

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self.ttl_seconds, self._clock = ttl_seconds, clock
        self._entries: dict[str, tuple[Stored, float]] = {}
        self._revisions = itertools.count(1)

    def get(self, key: str) -> Stored:
        stored, ends_at = self._entries.get(key, (NOTHING, 0.0))
        return stored if ends_at > self._clock() else NOTHING

    def put(self, key: str, value: bytes) -> None:
        self._entries[key] = (Stored(value, next(self._revisions)), self._clock() + self.ttl_seconds)

    def remove(self, key: str) -> None:
        self._entries.pop(key, None)

    def items(self) -> list[tuple[str, bytes]]:
        """All that has not expired."""
        return [(key, value) for key in self._entries if (value := self.get(key).value) is not None]

    def clear(self) -> None:
        self._entries.clear()


class MemoryBroker:
    """Shared by the buses that are to hear each other. `clock` gives seconds, for the expiry of presence
    and leases."""

    def __init__(
        self,
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        presence_ttl_seconds: float = PRESENCE_TTL_SECONDS,
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_payload_bytes = max_payload_bytes
        self._connections: list[MemoryConnection] = []
        self._subscriptions: dict[str, list[MemorySubscription]] = {}
        self.presence = Shelf(presence_ttl_seconds, clock)
        self.leases = Shelf(lease_seconds, clock)
        self._turns: dict[tuple[str, str], int] = {}

    def stop(self) -> None:
        """As if the broker had died: every bus is disconnected."""
        for connection in self._connections:
            self.disconnect(connection)

    def start(self, *, keeps_presence: bool = False) -> None:
        """It is back, by default with an empty store, and every bus is connected again."""
        if not keeps_presence:
            self.presence.clear()
            self.leases.clear()
        for connection in self._connections:
            self.reconnect(connection)

    def connect(self) -> MemoryConnection:
        """A new bus."""
        connection = MemoryConnection()
        self._connections.append(connection)
        return connection

    def leave(self, connection: MemoryConnection) -> None:
        """The bus is closed for good."""
        self.disconnect(connection)
        with suppress(ValueError):
            self._connections.remove(connection)

    def disconnect(self, connection: MemoryConnection) -> None:
        """It hears nothing, and its requests in flight are lost."""
        connection.is_connected = False
        connection.requests.fail_all(NotConnected(LOST_IN_FLIGHT))

    def reconnect(self, connection: MemoryConnection) -> None:
        """Its subscriptions stand again, its watches are told everything again."""
        if connection.is_connected:
            return
        connection.is_connected = True
        connection.num_reconnects_total += 1
        for watch in connection.watches:
            self.fill(watch)

    def add(self, subscription: MemorySubscription) -> None:
        """From now on it hears its subject."""
        self._subscriptions.setdefault(subscription.subject, []).append(subscription)

    def remove(self, subscription: MemorySubscription) -> None:
        """It hears nothing more. Idempotent."""
        others = [s for s in self._subscriptions.get(subscription.subject, ()) if s is not subscription]
        if others:
            self._subscriptions[subscription.subject] = others
        else:
            self._subscriptions.pop(subscription.subject, None)

    def route(self, subject: str, payload: bytes, reply: str = "") -> int:
        """To all, and to one of each queue group in turn; returns to how many."""
        receivers = list(self._receivers(subject))
        for subscription in receivers:
            subscription.offer(payload, reply)
        return len(receivers)

    def _receivers(self, subject: str) -> Iterator[MemorySubscription]:
        groups: dict[str, list[MemorySubscription]] = {}
        for subscription in self._subscriptions.get(subject, ()):
            if not subscription.connection.is_connected:
                continue
            if subscription.queue_group:
                groups.setdefault(subscription.queue_group, []).append(subscription)
            else:
                yield subscription
        for name, members in groups.items():
            turn = self._turns.get((subject, name), 0)
            self._turns[subject, name] = turn + 1
            yield members[turn % len(members)]

    def answer(self, reply: str, payload: bytes) -> None:
        """Resolve the request that waits under `reply`; nobody waits any more: nothing happens."""
        for connection in self._connections:
            connection.requests.answer(reply, payload)

    def refuse(self, reply: str, error: BusError) -> None:
        """Fail the request that waits under `reply`."""
        for connection in self._connections:
            connection.requests.fail(reply, error)

    def fill(self, watch: PresenceWatch) -> None:
        """Tell a watch all presence that has not expired."""
        watch.begin_filling()
        for key, value in self.presence.items():
            watch.filled(key, value)

    def announce(self, key: str, value: bytes | None) -> None:
        """Tell all watches a change of presence."""
        for connection in self._connections:
            if connection.is_connected:
                for watch in connection.watches:
                    watch.heard(key, value)
