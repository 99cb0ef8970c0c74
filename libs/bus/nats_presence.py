"""Presence in a JetStream key-value bucket, readable with `nats kv`.

The bucket lives in the broker's memory and vanishes with it, so it is made anew on each connection. Watchers
hear puts and deletes where these pass by, on the bucket's subjects, which needs nothing that the broker
could have forgotten; the bucket is read only to learn what was there before.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from nats.aio.msg import Msg

from libs.bus.nats_connection import NatsConnection
from libs.bus.nats_subscription import NatsSubscription
from libs.bus.port import BusError, NoResponders, PresenceEntry, PresenceUnavailable, RequestTimedOut
from libs.bus.presence_watch import PresenceWatch
from libs.bus.wire import MAX_WAITING_MESSAGES

BUCKET = "kvmesh_presence"
STREAM = f"KV_{BUCKET}"
PREFIX = f"$KV.{BUCKET}."
MAX_BUCKET_BYTES = 64 * 2**20
STORE_TIMEOUT_SECONDS = 1.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0

_OPERATION_HEADER, _STATUS_HEADER = "KV-Operation", "Status"
_EXISTS_WITH_OTHER_SETTINGS = 10058

log = structlog.get_logger()


class _Error(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _State(msgspec.Struct):
    subjects: dict[str, int] | None = None


class _Response(msgspec.Struct):
    """As much of JetStream's answers as matters here."""

    error: _Error | None = None
    state: _State = msgspec.field(default_factory=_State)


class _JetStreamRefused(PresenceUnavailable):
    def __init__(self, what: str, error: _Error) -> None:
        super().__init__(f"{what}: JetStream refused: {error.description} ({error.err_code})")
        self.code = error.err_code


class NatsPresence:
    """A `PresenceStore`."""

    def __init__(self, connection: NatsConnection, ttl_seconds: float) -> None:
        self._connection, self._ttl_seconds = connection, ttl_seconds
        self._has_bucket = False
        self._making_bucket = asyncio.Lock()
        self._watches: set[PresenceWatch] = set()
        self._stale: set[asyncio.Event] = set()
        connection.on_lost(self._was_lost)
        connection.on_connected(self._was_found)

    async def put(self, key: str, value: bytes) -> None:
        """As in `Bus`."""
        await self._store(key, value, None)

    async def delete(self, key: str) -> None:
        """As in `Bus`."""
        await self._store(key, b"", {_OPERATION_HEADER: "DEL"})

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[PresenceEntry]]:
        """As in `Bus`."""
        watch, stale = PresenceWatch(), asyncio.Event()

        async def on_message(message: Msg) -> None:
            watch.heard(message.subject.removeprefix(PREFIX), _value_of(message.data, message.headers))

        subscription = NatsSubscription(self._connection, f"{PREFIX}>", "", on_message, MAX_WAITING_MESSAGES)
        await self._connection.subscribe_messages(subscription)
        self._watches.add(watch)
        self._stale.add(stale)
        stale.set()
        # Owned by the connection: a task group would wrap the errors of those who watch.
        filling = asyncio.create_task(self._keep_filled(watch, stale), name="presence-fill")
        self._connection.keep(filling)
        try:
            yield watch
        finally:
            filling.cancel()
            self._watches.discard(watch)
            self._stale.discard(stale)
            await subscription.close()

    def close(self) -> None:
        """As in `PresenceStore`."""
        for watch in self._watches:
            watch.end()

    def _was_lost(self) -> None:
        self._has_bucket = False

    def _was_found(self) -> None:
        for stale in self._stale:
            stale.set()

    async def _store(self, key: str, value: bytes, headers: dict[str, str] | None) -> None:
        await self._ensure_bucket()
        try:
            answer = await self._connection.ask_message(PREFIX + key, value, STORE_TIMEOUT_SECONDS, headers)
            _read_response(answer.data, f"storing {key} in {BUCKET}")
        except (NoResponders, RequestTimedOut) as error:
            self._has_bucket = False  # somebody removed it; the next put makes it again
            raise PresenceUnavailable(f"{key} was not stored in {BUCKET}: {error}") from error

    async def _ensure_bucket(self) -> None:
        async with self._making_bucket:
            if not self._has_bucket:
                await self._make_bucket()
                self._has_bucket = self._connection.is_connected

    async def _make_bucket(self) -> None:
        """Harmless where it is there already."""
        settings = bucket_settings(self._ttl_seconds)
        try:
            await self._administrate("CREATE", settings)
        except _JetStreamRefused as error:
            if error.code != _EXISTS_WITH_OTHER_SETTINGS:
                raise
            await self._administrate("UPDATE", settings)
            log.warning("presence_bucket_changed", bucket=BUCKET, ttl_seconds=self._ttl_seconds)

    async def _administrate(self, verb: str, arguments: dict[str, Any]) -> _Response:
        try:
            answer = await self._connection.ask(
                f"$JS.API.STREAM.{verb}.{STREAM}", msgspec.json.encode(arguments), STORE_TIMEOUT_SECONDS
            )
        except NoResponders:
            raise PresenceUnavailable("JetStream is off in the broker; presence needs it") from None
        return _read_response(answer, f"{verb} {BUCKET}")

    async def _keep_filled(self, watch: PresenceWatch, stale: asyncio.Event) -> None:
        """Tell the full state on each connection."""
        while True:
            await stale.wait()
            stale.clear()
            retry_seconds = FIRST_RETRY_SECONDS
            while self._connection.is_connected:
                try:
                    await self._fill(watch)
                    break
                except BusError as error:
                    log.debug("presence_not_read", error=repr(error))
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)

    async def _fill(self, watch: PresenceWatch) -> None:
        await self._ensure_bucket()
        watch.begin_filling()
        info = await self._administrate("INFO", {"subjects_filter": f"{PREFIX}>"})
        for subject in info.state.subjects or ():
            entry = await self._connection.ask_message(
                f"$JS.API.DIRECT.GET.{STREAM}.{subject}", b"", STORE_TIMEOUT_SECONDS
            )
            value = _value_of(entry.data, entry.headers)
            if value is not None:
                watch.filled(subject.removeprefix(PREFIX), value)


def bucket_settings(ttl_seconds: float) -> dict[str, Any]:
    """What makes a stream a key-value bucket, as in the NATS key-value specification (ADR-8)."""
    ttl_nanoseconds = int(ttl_seconds * 1e9)
    return {
        "name": STREAM,
        "description": "who is there in the mesh",
        "subjects": [f"{PREFIX}>"],
        "storage": "memory",
        "retention": "limits",
        "discard": "new",
        "max_age": ttl_nanoseconds,
        "duplicate_window": ttl_nanoseconds,
        "max_msgs_per_subject": 1,
        "max_msgs": -1,
        "max_consumers": -1,
        "max_msg_size": -1,
        "max_bytes": MAX_BUCKET_BYTES,
        "num_replicas": 1,
        "allow_direct": True,
        "allow_msg_ttl": True,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
    }


def _read_response(answer: bytes, what: str) -> _Response:
    try:
        response = msgspec.json.decode(answer, type=_Response)
    except msgspec.DecodeError as error:
        raise PresenceUnavailable(f"{what}: JetStream answered {answer[:200]!r}") from error
    if response.error is not None:
        raise _JetStreamRefused(what, response.error)
    return response


def _value_of(data: bytes, headers: dict[str, str] | None) -> bytes | None:
    """None for a delete, a purge, and for what has expired since it was listed."""
    return None if headers and (_OPERATION_HEADER in headers or _STATUS_HEADER in headers) else data
