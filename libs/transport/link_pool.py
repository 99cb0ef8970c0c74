"""Connections to peers, one for each, and requests over one Link."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import structlog

from libs.transport.port import LinkLost

Spawn = Callable[[str, Coroutine[Any, Any, None]], object]

_log = structlog.get_logger(__name__)


class Connection(Protocol):
    """What runs over a Link to one peer."""

    @property
    def is_open(self) -> bool:
        """False once nothing can be asked any more."""
        ...

    async def serve(self) -> str:
        """Takes in what comes until the Link is over; returns why."""
        ...

    async def close(self) -> None:
        """Idempotent; `serve` returns."""
        ...


C = TypeVar("C", bound=Connection)
W = TypeVar("W")
E = TypeVar("E", bound=Exception)


class LinkPool(Generic[C]):
    """By the peer's incarnation; made when first needed and kept until lost or dropped. `on_end` hears which
    connection is over, why, and whether it was dropped."""

    def __init__(self, spawn: Spawn, on_end: Callable[[C, str, bool], None] | None = None) -> None:
        self._spawn, self._on_end = spawn, on_end
        self._open: dict[str, C] = {}
        self._dropped: set[C] = set()
        """Of those that are being closed."""
        self._connecting: dict[str, asyncio.Lock] = {}

    def get(self, peer: str) -> C | None:
        """The connection that stands."""
        found = self._open.get(peer)
        return found if found is not None and found.is_open else None

    def peers(self) -> set[str]:
        """To whom connections stand, or stood until now."""
        return set(self._open)

    def is_connecting(self, peer: str) -> bool:
        """Whether one is being made."""
        return peer in self._connecting and self._connecting[peer].locked()

    async def connect(self, peer: str, make: Callable[[], Awaitable[C]]) -> C:
        """The connection that stands, or a new one. Raises what `make` raises, and LinkLost for a peer that
        is dropped meanwhile."""
        lock = self._connecting.setdefault(peer, asyncio.Lock())
        async with lock:
            if (standing := self.get(peer)) is not None:
                return standing
            self._check(peer, lock)
            made = await make()
            try:
                self._check(peer, lock)
            except LinkLost:
                self._spawn("close-link", made.close())
                raise
            self._open[peer] = made
            self._spawn("serve-link", self._serve(peer, made))
            return made

    def drop(self, peer: str) -> C | None:
        """Closes the connection and returns it, if there is one. Who connects again gets a new one."""
        self._connecting.pop(peer, None)
        if (dropped := self._open.pop(peer, None)) is not None:
            self._dropped.add(dropped)
            self._spawn("close-link", dropped.close())
        return dropped

    def _check(self, peer: str, lock: asyncio.Lock) -> None:
        if self._connecting.get(peer) is not lock:
            raise LinkLost(f"{peer} was given up while it was being reached")

    async def _serve(self, peer: str, connection: C) -> None:
        reason = await connection.serve()
        _log.info("link_ended", peer=peer, reason=reason)
        if self._open.get(peer) is connection:
            del self._open[peer]
        if self._on_end is not None:
            self._on_end(connection, reason, connection in self._dropped)
        self._dropped.discard(connection)


class LinkRequests(Generic[W, E]):
    """What waits for the answers to come over one Link, by the id of its request. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = count(1)
        self._waiting: dict[int, W] = {}
        self.lost: E | None = None
        """Why no answer will come any more."""

    def add(self, waiter: W) -> int:
        """The id for a request. Raises `lost`."""
        with self._lock:
            if self.lost is not None:
                raise self.lost
            request_id = next(self._ids)
            self._waiting[request_id] = waiter
            return request_id

    def get(self, request_id: int) -> W | None:
        """Who waits, if anybody still does."""
        return self._waiting.get(request_id)

    def take(self, request_id: int) -> W | None:
        """Who waits; nobody from now on."""
        with self._lock:
            return self._waiting.pop(request_id, None)

    def lose(self, error: E) -> tuple[E, list[W]]:
        """The error, of which the first counts, and all who wait; nobody from now on."""
        with self._lock:
            self.lost = self.lost or error
            waiting, self._waiting = list(self._waiting.values()), {}
            return self.lost, waiting
