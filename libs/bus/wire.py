"""What the typed bus stands on: bytes on subjects, presence as bytes, and leases. One set for NATS, one in
memory."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from libs.bus.port import (
    BusError,
    HandlerFailed,
    NoResponders,
    Overloaded,
    PresenceEntry,
    Undecodable,
)

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
        """As in `Bus`."""
        ...

    @property
    def max_payload_bytes(self) -> int:
        """As in `Bus`."""
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
        """Send an answer to whoever asked."""
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


class PresenceStore(Protocol):
    """Keys that live as long as they are put again. The caller has checked keys and sizes."""

    async def put(self, key: str, value: bytes) -> None:
        """As `Bus.put_presence`."""
        ...

    async def delete(self, key: str) -> None:
        """As `Bus.delete_presence`."""
        ...

    def watch(self) -> AbstractAsyncContextManager[AsyncIterator[PresenceEntry]]:
        """As `Bus.watch_presence`."""
        ...

    def close(self) -> None:
        """End the watches."""
        ...


class LeaseStore(Protocol):
    """Who has which lease. The caller has checked names and holders."""

    @property
    def lease_seconds(self) -> float:
        """As in `Bus`."""
        ...

    async def hold(self, name: str, holder: str) -> bool:
        """As `Bus.hold_lease`."""
        ...

    async def release(self, name: str, holder: str) -> None:
        """As `Bus.release_lease`."""
        ...

    async def holder(self, name: str) -> str | None:
        """As `Bus.lease_holder`."""
        ...


_TRAVELLING_ERRORS: dict[str, type[BusError]] = {
    kind.__name__: kind for kind in (HandlerFailed, NoResponders, Overloaded, Undecodable)
}


def error_named(name: str, text: str) -> BusError:
    """The error that a peer refused with; a name that is not known here is a HandlerFailed."""
    return _TRAVELLING_ERRORS.get(name, HandlerFailed)(text)
