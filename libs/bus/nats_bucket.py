"""A JetStream key-value bucket in the broker's memory, through nats-py, readable with `nats kv`.

The bucket vanishes with the broker, so it is made anew on each connection. Watchers hear puts and deletes
where these pass by, on the bucket's subjects, which needs nothing that the broker could have forgotten (a
consumer, as nats-py's own watch has one); the bucket is read only to learn what was there before.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js.api import StorageType
from nats.js.client import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KV_OP, KeyValue

from libs.bus.errors import BusError, NotConnected, PresenceUnavailable, RequestTimedOut
from libs.bus.message import PresenceEntry
from libs.bus.nats_connection import NatsConnection
from libs.bus.nats_subscription import NatsSubscription
from libs.bus.presence_watch import PresenceWatch
from libs.bus.wire import MAX_WAITING_MESSAGES, Stored

T = TypeVar("T")

MAX_BUCKET_BYTES = 64 * 2**20
STORE_TIMEOUT_SECONDS = 1.0
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0

_EXISTS_WITH_OTHER_SETTINGS = 10058
_WRONG_LAST_SEQUENCE = (10071, 10164)

log = structlog.get_logger()


class NatsBucket:
    """A `Bucket`."""

    def __init__(self, connection: NatsConnection, name: str, description: str, ttl_seconds: float) -> None:
        self._connection, self._name, self._description = connection, name, description
        self.ttl_seconds = ttl_seconds
        self._stream, self._prefix = f"KV_{name}", f"$KV.{name}."
        self._opened: KeyValue | None = None
        self._opening = asyncio.Lock()
        self._watches: dict[PresenceWatch, asyncio.Event] = {}
        connection.on_lost(self._was_lost)
        connection.on_connected(self._was_found)

    async def put(self, key: str, value: bytes) -> None:
        """As in `Bucket`."""
        await self._call(lambda bucket: bucket.put(key, value))

    async def delete(self, key: str, revision: int | None = None) -> bool:
        """As in `Bucket`."""
        try:
            return await self._call(lambda bucket: bucket.delete(key, last=revision))
        except KeyWrongLastSequenceError:
            return False

    async def get(self, key: str) -> Stored:
        """As in `Bucket`."""
        try:
            entry = await self._call(lambda bucket: bucket.get(key))
        except KeyNotFoundError:
            return Stored(None, 0)
        return Stored(entry.value or b"", entry.revision or 0)

    async def replace(self, key: str, value: bytes, revision: int) -> bool:
        """As in `Bucket`."""
        try:
            if revision:
                await self._call(lambda bucket: bucket.update(key, value, last=revision))
            else:
                await self._call(lambda bucket: bucket.create(key, value))
        except KeyWrongLastSequenceError:
            return False
        return True

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[PresenceEntry]]:
        """As in `Bucket`."""
        watch, stale = PresenceWatch(), asyncio.Event()

        async def on_message(message: Msg) -> None:
            value = None if KV_OP in (message.headers or ()) else message.data
            watch.heard(message.subject.removeprefix(self._prefix), value)

        subscription = NatsSubscription(
            self._connection, f"{self._prefix}>", "", on_message, MAX_WAITING_MESSAGES
        )
        await self._connection.subscribe_messages(subscription)
        self._watches[watch] = stale
        stale.set()
        # Owned by the connection: a task group would wrap the errors of the watching code.
        filling = asyncio.create_task(self._keep_filled(watch, stale), name="presence-fill")
        self._connection.keep(filling)
        try:
            yield watch
        finally:
            filling.cancel()
            del self._watches[watch]
            await subscription.close()

    def close(self) -> None:
        """As in `Bucket`."""
        for watch in self._watches:
            watch.end()

    def _was_lost(self) -> None:
        self._opened = None

    def _was_found(self) -> None:
        for stale in self._watches.values():
            stale.set()

    async def _keep_filled(self, watch: PresenceWatch, stale: asyncio.Event) -> None:
        """Repeat the full state on each connection."""
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
        info = await self._call(lambda _: self._jetstream().stream_info(self._stream, f"{self._prefix}>"))
        watch.begin_filling()
        for subject in info.state.subjects or ():
            key = subject.removeprefix(self._prefix)
            value = (await self.get(key)).value
            if value is not None:
                watch.filled(key, value)

    async def _call(self, operation: Callable[[KeyValue], Awaitable[T]]) -> T:
        """Raises KeyNotFoundError, KeyWrongLastSequenceError, and all else as BusErrors."""
        try:
            return await operation(await self._open())
        except (KeyNotFoundError, KeyWrongLastSequenceError):
            raise
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise KeyWrongLastSequenceError(description=error.description) from error
            self._opened = None
            reason = error.description or "JetStream is off in the broker; presence needs it"
            raise PresenceUnavailable(f"{self._name}: {reason} ({error.err_code})") from error
        except (nats.js.errors.NoStreamResponseError, nats.errors.NoRespondersError) as error:
            self._opened = None  # it was removed; the next operation makes it again
            raise PresenceUnavailable(f"{self._name}: there is no such bucket any more") from error
        except nats.errors.TimeoutError as error:
            self._opened = None
            raise RequestTimedOut(f"{self._name}: no answer within {STORE_TIMEOUT_SECONDS:g} s") from error
        except (nats.errors.Error, OSError) as error:
            raise NotConnected(f"{self._name}: {error!r}") from error

    async def _open(self) -> KeyValue:
        """Make it where it is not there."""
        async with self._opening:
            if self._opened is not None:
                return self._opened
            bucket = await self._make(self._jetstream())
            if self._connection.is_connected:
                self._opened = bucket
            return bucket

    async def _make(self, jetstream: JetStreamContext) -> KeyValue:
        try:
            return await jetstream.create_key_value(
                bucket=self._name,
                description=self._description,
                ttl=self.ttl_seconds,
                max_bytes=MAX_BUCKET_BYTES,
                storage=StorageType.MEMORY,
                direct=True,
            )
        except nats.js.errors.BadRequestError as error:
            if error.err_code != _EXISTS_WITH_OTHER_SETTINGS:
                raise
        info = await jetstream.stream_info(self._stream)
        await jetstream.update_stream(
            info.config,
            description=self._description,
            max_age=self.ttl_seconds,
            duplicate_window=self.ttl_seconds,
            max_bytes=MAX_BUCKET_BYTES,
            allow_direct=True,
        )
        log.warning("bucket_changed", bucket=self._name, ttl_seconds=self.ttl_seconds)
        return await jetstream.key_value(self._name)

    def _jetstream(self) -> JetStreamContext:
        return self._connection.client.jetstream(timeout=STORE_TIMEOUT_SECONDS)
