"""The port of the bus: bytes on subjects, and buckets of keys that expire. NATS is one side, the tests'
in-memory broker the other."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from libs.bus.errors import BusError
from libs.bus.message import PresenceEntry

MAX_WAITING_MESSAGES = 8192
MAX_WAITING_REQUESTS = 1024

LOST_IN_FLIGHT = "the connection to the broker broke; the answer, if any, is lost"

OnPayload = Callable[[bytes, str], Awaitable[None] | None]
"""Called with the payload and where to send the answer (empty: none is wanted). Must not raise."""


class WireSubscription(Protocol):
    """Payloads of one subject, handed over one after the other."""

    @property
    def num_waiting(self) -> int:
        """Payloads received and not yet handed over."""
        ...

    async def close(self) -> None:
        """Stop new payloads, hand over those that are here, wait for that. Idempotent. Called from within
        its own `OnPayload` it does not wait."""
        ...


class Wire(Protocol):
    """Bytes to subjects. Raises BusErrors only; the caller has checked the sizes."""

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable now."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """The most that the broker accepts in one message."""
        ...

    @property
    def num_reconnects_total(self) -> int:
        """How often the broker came back."""
        ...

    @property
    def num_dropped_total(self) -> int:
        """Payloads lost because a subscription was full."""
        ...

    @property
    def num_open_requests(self) -> int:
        """Asked and not yet answered."""
        ...

    async def send(self, subject: str, payload: bytes) -> None:
        """To all subscriptions of the subject, and to one of each queue group."""
        ...

    async def ask(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        """Send and wait for the answer; raises what `refuse` was called with."""
        ...

    async def answer(self, reply: str, payload: bytes) -> None:
        """Send an answer to the asker."""
        ...

    async def refuse(self, reply: str, error: BusError) -> None:
        """Have the asker's `ask` raise `error`."""
        ...

    async def subscribe(
        self, subject: str, queue_group: str, on_payload: OnPayload, *, answers: bool
    ) -> WireSubscription:
        """Hand over payloads until closed. `answers`: askers whose payload does not fit in any more are
        refused."""
        ...

    async def close(self) -> None:
        """Send what waits, then disconnect. Idempotent."""
        ...


class Stored(msgspec.Struct, frozen=True):
    """The content of a bucket under one key; None and 0 where nothing is."""

    value: bytes | None
    revision: int


class Bucket(Protocol):
    """Values that expire `ttl_seconds` after they were stored. The caller has checked keys and sizes.

    Raises NotConnected, RequestTimedOut, PresenceUnavailable.
    """

    @property
    def ttl_seconds(self) -> float:
        """How long a value lasts."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Store, whatever is there."""
        ...

    async def delete(self, key: str, revision: int | None = None) -> bool:
        """Remove, where `revision` is given only that one. False: another one is there."""
        ...

    async def get(self, key: str) -> Stored:
        """Read one key."""
        ...

    async def replace(self, key: str, value: bytes, revision: int) -> bool:
        """Store where this revision is still there (0: where nothing is). False: another one is there."""
        ...

    def watch(self) -> AbstractAsyncContextManager[AsyncIterator[PresenceEntry]]:
        """As `Bus.watch_presence`."""
        ...

    def close(self) -> None:
        """End the watches."""
        ...
