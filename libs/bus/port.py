"""What the mesh needs of a message bus. Two implementations pass one contract suite: NATS and in-memory.

A message type knows its subject (`Message.subject`, with `{to}` for the incarnation it is addressed to) and,
if it asks something, its answer (`Request[Answer]`). Delivery is at most once; whoever needs an answer asks
for one.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

Answer = TypeVar("Answer")
M = TypeVar("M", bound="Message")

LEASE_SECONDS = 3.0
"""How long a lease lasts after it was held last, where a bus is not told otherwise."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A fact or an order, published to whoever listens on its subject."""

    subject: ClassVar[str]


class Request(Message, Generic[Answer], frozen=True, kw_only=True):
    """A message that is answered once. `answer` is the type (or tagged union) that the answer decodes to."""

    answer: ClassVar[Any]


class BusError(Exception):
    """The root of the bus's errors.

    NotConnected, NoResponders, RequestTimedOut, MessageTooLarge, Undecodable, HandlerFailed, Overloaded,
    PresenceUnavailable
    """


class NotConnected(BusError):
    """The broker is away; raised at once instead of waiting for the timeout.

    Also raised for a request in flight when the connection breaks: its answer is lost, so it may or may not
    have been acted on.
    """


class NoResponders(BusError):
    """Nobody serves this request: the incarnation addressed is gone."""


class RequestTimedOut(BusError):
    """No answer within `timeout_seconds`."""


class MessageTooLarge(BusError):
    """The encoded message exceeds the broker's max_payload; carries both sizes."""

    def __init__(self, subject: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"message for {subject} has {size_bytes} bytes, the broker's max_payload is {limit_bytes}"
        )
        self.subject, self.size_bytes, self.limit_bytes = subject, size_bytes, limit_bytes


class Undecodable(BusError):
    """The peer sent something that is not the expected type: versions differ, or somebody else uses the
    subject."""


class HandlerFailed(BusError):
    """The peer's handler raised, or its answer could not be sent. The peer has logged why."""


class Overloaded(BusError):
    """A bounded queue is full: the peer's requests, or what waits here for the broker. Try again later."""


class PresenceUnavailable(BusError):
    """The broker keeps no presence and no leases: JetStream is off, still starting, or refuses the entry."""


class BusCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one bus so far (`num_*_total`), and how full it is now."""

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


class Subscription(Protocol):
    """A live subscription; survives reconnects."""

    async def close(self) -> None:
        """Take no more messages, then wait for the handlers in progress. Idempotent.

        Called by a handler of this very subscription, it does not wait. Requests that no handler has begun
        are answered with `NoResponders`.
        """
        ...


class PresenceEntry(msgspec.Struct, frozen=True):
    """One change in a presence bucket: `value` None says the key was deleted."""

    key: str
    value: bytes | None


class Bus(Protocol):
    """Publish, request, presence and leases, typed by the messages."""

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable now."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """What the broker accepts in one message."""
        ...

    @property
    def counts(self) -> BusCounts:
        """Figures for metrics; cheap."""
        ...

    async def publish(self, message: Message, *, to: str = "") -> None:
        """Send without an answer. Raises MessageTooLarge, NotConnected or Overloaded, never blocks for long.

        `to` fills `{to}` in the message's subject: letters, digits, `-` and `_`. ValueError if it does not
        fit.
        """
        ...

    async def request(self, message: Request[Answer], *, to: str = "", timeout_seconds: float) -> Answer:
        """Send and wait for the answer. Raises any BusError; all but RequestTimedOut come without waiting
        for the timeout."""
        ...

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
        ...

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
        ...

    async def put_presence(self, key: str, value: bytes) -> None:
        """Write a key that disappears by itself `presence_ttl_seconds` after its last put. Keys:
        [A-Za-z0-9_-.].

        Raises NotConnected at once, RequestTimedOut or PresenceUnavailable; putting again repairs
        everything."""
        ...

    async def delete_presence(self, key: str) -> None:
        """Remove a key now."""
        ...

    def watch_presence(self) -> AbstractAsyncContextManager[AsyncIterator[PresenceEntry]]:
        """All keys as they are, then every put and delete. Expiry may pass unannounced: a watcher keeps its
        own clock. Goes on through broker restarts, also when the broker comes back empty, and tells all keys
        again after each. Keys that were lost meanwhile are not told: they expire. A slow watcher gets only
        the latest of each key. Ends with StopAsyncIteration when the bus is closed."""
        ...

    @property
    def lease_seconds(self) -> float:
        """How long a lease lasts after it was held last."""
        ...

    async def hold_lease(self, name: str, holder: str) -> bool:
        """Take a lease that nobody has, or renew one's own; whether it is the holder's from now on for
        `lease_seconds`. Of several who ask at once, one has it. Names and holders: as presence keys.

        It is worth what the broker remembers: one that comes back empty gives it to whoever asks first, so a
        holder that lost the broker has it no more until it holds it again. Raises NotConnected at once,
        RequestTimedOut or PresenceUnavailable: whether it was taken is not known then."""
        ...

    async def release_lease(self, name: str, holder: str) -> None:
        """Let the next one have it now. Nothing happens where it is not this holder's. Raises as
        `hold_lease`."""
        ...

    async def lease_holder(self, name: str) -> str | None:
        """Who has it now. Raises as `hold_lease`."""
        ...

    async def close(self) -> None:
        """Flush, end subscriptions, disconnect. Idempotent."""
        ...
