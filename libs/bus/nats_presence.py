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
import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import StorageType

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

_OPERATION_HEADER = "KV-Operation"
_STREAM_EXISTS_WITH_OTHER_SETTINGS = 10058

log = structlog.get_logger()


class _Ack(msgspec.Struct):
    """What JetStream says to a message: where it lies, or why not."""

    error: dict[str, Any] | None = None


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
        try:
            async with asyncio.TaskGroup() as group:
                filling = group.create_task(self._keep_filled(watch, stale), name="presence-fill")
                try:
                    yield watch
                finally:
                    filling.cancel()
        finally:
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
            refusal = msgspec.json.decode(answer.data, type=_Ack).error
        except (NoResponders, RequestTimedOut, msgspec.DecodeError) as error:
            self._has_bucket = False  # somebody removed it; the next put makes it again
            raise PresenceUnavailable(f"{key} was not stored in {BUCKET}: {error}") from error
        if refusal is not None:
            raise PresenceUnavailable(f"{key} was not stored in {BUCKET}: {refusal}")

    async def _ensure_bucket(self) -> None:
        async with self._making_bucket:
            if self._has_bucket:
                return
            try:
                await self._make_bucket()
            except (nats.errors.Error, OSError) as error:
                raise PresenceUnavailable(f"no bucket {BUCKET}, is JetStream on? {error!r}") from error
            self._has_bucket = self._connection.is_connected

    async def _make_bucket(self) -> None:
        """Harmless where it is there already."""
        jetstream = self._connection.client.jetstream(timeout=STORE_TIMEOUT_SECONDS)
        try:
            await jetstream.create_key_value(
                bucket=BUCKET,
                description="who is there in the mesh",
                ttl=self._ttl_seconds,
                max_bytes=MAX_BUCKET_BYTES,
                storage=StorageType.MEMORY,
            )
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _STREAM_EXISTS_WITH_OTHER_SETTINGS:
                raise
            config = (await jetstream.stream_info(STREAM)).config
            config.max_age = config.duplicate_window = self._ttl_seconds
            await jetstream.update_stream(config)
            log.warning("presence_bucket_changed", bucket=BUCKET, ttl_seconds=self._ttl_seconds)

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
                except (BusError, nats.errors.Error, OSError) as error:
                    log.debug("presence_not_read", error=repr(error))
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, MAX_RETRY_SECONDS)

    async def _fill(self, watch: PresenceWatch) -> None:
        await self._ensure_bucket()
        watch.begin_filling()
        bucket = self._connection.client.jetstream(timeout=STORE_TIMEOUT_SECONDS)
        info = await bucket.stream_info(STREAM, subjects_filter=f"{PREFIX}>")
        for subject in info.state.subjects or {}:
            try:
                entry = await bucket.get_last_msg(STREAM, subject)
            except nats.js.errors.NotFoundError:
                continue  # expired meanwhile
            value = _value_of(entry.data or b"", entry.headers)
            if value is not None:
                watch.filled(subject.removeprefix(PREFIX), value)


def _value_of(data: bytes, headers: dict[str, str] | None) -> bytes | None:
    """None for a delete or a purge."""
    return None if headers and _OPERATION_HEADER in headers else data
