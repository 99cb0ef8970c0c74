"""One subscription on a NATS connection, over all clients that the connection has in its life."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from libs.bus.errors import BusError

MAX_WAITING_BYTES = 64 * 2**20
UNSUBSCRIBE_TIMEOUT_SECONDS = 1.0


class Owner(Protocol):
    """The connection."""

    def keep(self, task: asyncio.Task[None]) -> None:
        """Own a task."""
        ...

    async def round_trip(self, timeout_seconds: float) -> None:
        """Wait until the broker has taken all that was sent before."""
        ...

    def forget(self, subscription: "NatsSubscription") -> None:
        """It is closed."""
        ...


class NatsSubscription:
    """A `WireSubscription`."""

    def __init__(
        self,
        owner: Owner,
        subject: str,
        queue_group: str,
        on_message: Callable[[Msg], Awaitable[None]],
        max_waiting: int,
        *,
        answers: bool = False,
    ) -> None:
        self._owner, self._subject, self._queue_group = owner, subject, queue_group
        self._on_message, self._max_waiting, self.answers = on_message, max_waiting, answers
        self._subscription: Subscription | None = None
        self._client: Client
        self._task: asyncio.Task[Any] | None = None
        self._is_handling = False
        self._drained: asyncio.Future[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Messages received and not yet handed over."""
        return self._subscription.pending_msgs if self._subscription else 0

    def is_of(self, subscription: Subscription) -> bool:
        """Whether this is nats-py's subscription behind it."""
        return subscription is self._subscription

    async def attach(self, client: Client) -> None:
        """Subscribe on a client; it replays this itself after each reconnect."""
        if self._closing is not None:
            return
        self._client = client
        self._subscription = await client.subscribe(
            self._subject,
            queue=self._queue_group,
            cb=self._take,
            pending_msgs_limit=self._max_waiting,
            pending_bytes_limit=MAX_WAITING_BYTES,
        )

    async def _take(self, message: Msg) -> None:
        self._task, self._is_handling = asyncio.current_task(), True
        try:
            await self._on_message(message)
        finally:
            self._is_handling = False
            self._tell_if_drained()

    async def close(self) -> None:
        """As in `WireSubscription`."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._drain(), name=f"close-{self._subject}")
            self._owner.keep(self._closing)
        if asyncio.current_task() is not self._task:
            await asyncio.wait({self._closing})

    async def cancel(self) -> None:
        """Drop what waits, and the handler in progress."""
        if self._subscription is not None:
            with suppress(nats.errors.Error):
                await self._subscription.unsubscribe()

    def client_gone(self) -> None:
        """The client ended for good, and with it what waited here."""
        self._subscription = None
        self._tell_if_drained()

    async def _drain(self) -> None:
        subscription = self._subscription
        if subscription is not None:
            with suppress(BusError, nats.errors.Error):
                # nats-py's own `drain` waits ten seconds when the broker goes meanwhile, and then subscribes
                # again.
                await self._client._send_unsubscribe(subscription._id)  # pyright: ignore[reportPrivateUsage]
                await self._owner.round_trip(UNSUBSCRIBE_TIMEOUT_SECONDS)
            if self._is_handling or self.num_waiting:
                self._drained = asyncio.get_running_loop().create_future()
                await self._drained
            await self.cancel()
        self._owner.forget(self)

    def _tell_if_drained(self) -> None:
        if self._drained is not None and not self._drained.done() and not self.num_waiting:
            self._drained.set_result(None)
