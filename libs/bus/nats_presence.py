"""Presence in a JetStream key-value bucket.

Watchers hear puts and deletes where these pass by, on the bucket's subjects, which needs nothing that the
broker could have forgotten; the bucket is read only to learn what was there before.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import structlog
from nats.aio.msg import Msg

from libs.bus.nats_bucket import NatsBucket, value_of
from libs.bus.nats_connection import NatsConnection
from libs.bus.nats_subscription import NatsSubscription
from libs.bus.port import BusError, PresenceEntry
from libs.bus.presence_watch import PresenceWatch
from libs.bus.wire import MAX_WAITING_MESSAGES

BUCKET = "kvmesh_presence"
STREAM = f"KV_{BUCKET}"
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0

log = structlog.get_logger()


class NatsPresence:
    """A `PresenceStore`."""

    def __init__(self, connection: NatsConnection, ttl_seconds: float) -> None:
        self._connection = connection
        self._bucket = NatsBucket(connection, BUCKET, "who is there in the mesh", ttl_seconds)
        self._watches: set[PresenceWatch] = set()
        self._stale: set[asyncio.Event] = set()
        connection.on_connected(self._was_found)

    async def put(self, key: str, value: bytes) -> None:
        """As in `Bus`."""
        await self._bucket.put(key, value)

    async def delete(self, key: str) -> None:
        """As in `Bus`."""
        await self._bucket.put(key, b"", is_delete=True)

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[PresenceEntry]]:
        """As in `Bus`."""
        watch, stale = PresenceWatch(), asyncio.Event()
        prefix = self._bucket.prefix

        async def on_message(message: Msg) -> None:
            watch.heard(message.subject.removeprefix(prefix), value_of(message.data, message.headers))

        subscription = NatsSubscription(self._connection, f"{prefix}>", "", on_message, MAX_WAITING_MESSAGES)
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

    def _was_found(self) -> None:
        for stale in self._stale:
            stale.set()

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
        await self._bucket.ensure()
        watch.begin_filling()
        for key in await self._bucket.keys():
            value = (await self._bucket.get(key)).value
            if value is not None:
                watch.filled(key, value)
