"""The wire over NATS: one logical connection that comes back for ever, and its requests in flight.

Over nats-py this adds what its own `request` lacks: requests in flight fail when the connection breaks
instead of waiting for their timeouts, and errors travel back as answers.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from libs.bus.broker_address import BrokerAddress
from libs.bus.errors import BusError, NoResponders, NotConnected, Overloaded, RequestTimedOut, error_named
from libs.bus.nats_subscription import NatsSubscription
from libs.bus.open_requests import OpenRequests
from libs.bus.wire import LOST_IN_FLIGHT, MAX_WAITING_MESSAGES, MAX_WAITING_REQUESTS, OnPayload

RECONNECT_SECONDS = 0.1
PING_SECONDS = 2
"""Two pings without a pong and the connection is taken for dead: a frozen broker, a network that swallows."""

MAX_UNSENT_BYTES = 2 * 2**20
ROOM_TIMEOUT_SECONDS = 1.0
CLOSE_TIMEOUT_SECONDS = 2.0
_ERROR_HEADER = "Kvmesh-Error"
_STATUS_HEADER = "Status"
_NO_RESPONDERS_STATUS = "503"

log = structlog.get_logger()


class NatsConnection:
    """A `Wire`. Opened once with `open`; afterwards it finds the broker again by itself."""

    def __init__(self, address: BrokerAddress, name: str) -> None:
        self._address, self._name = address, name
        self.client = Client()
        self._is_opening = False
        self._is_closed = False
        self._answers: NatsSubscription
        self._requests = OpenRequests[Msg]("")
        self._subscriptions: set[NatsSubscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_connected: list[Callable[[], None]] = []
        self._on_lost: list[Callable[[], None]] = []
        self.num_reconnects_total = 0
        self.num_dropped_total = 0
        self._drop_logged_at = float("-inf")

    @property
    def is_connected(self) -> bool:
        """Whether the broker is reachable now."""
        return self.client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        """As in `Wire`; as of the last connection."""
        return self.client.max_payload

    @property
    def num_open_requests(self) -> int:
        """Asked and not yet answered."""
        return len(self._requests)

    def on_connected(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time the broker has come back and the subscriptions stand again."""
        self._on_connected.append(listener)

    def on_lost(self, listener: Callable[[], None]) -> None:
        """Call `listener` each time the broker is gone."""
        self._on_lost.append(listener)

    async def open(self) -> None:
        """Raises NotConnected at once when the broker does not answer."""
        self._is_opening = True
        client = Client()
        try:
            await client.connect(
                list(self._address.urls),
                name=self._name,
                error_cb=self._error_came,
                disconnected_cb=self._was_lost,
                reconnected_cb=self._was_found,
                closed_cb=self._was_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # it sleeps for it
                ping_interval=PING_SECONDS,
                # `_make_room` bounds what is unsent; nats-py's own way swallows cancellation.
                pending_size=32 * MAX_UNSENT_BYTES,
            )
            if (task := asyncio.current_task()) and task.cancelling():
                raise asyncio.CancelledError  # nats-py may have swallowed it
            self.client, self._requests.prefix = client, f"{client.new_inbox()}."
            self._answers = NatsSubscription(
                self, f"{self._requests.prefix}*", "", self._answer_came, MAX_WAITING_MESSAGES
            )
            earlier = list(self._subscriptions)  # those that come from now on attach themselves
            for subscription in [self._answers, *earlier]:
                await subscription.attach(client)
        except (nats.errors.Error, OSError) as error:
            await self._close_client(client)
            raise NotConnected(f"no broker at {self._address.shown}: {error!r}") from error
        except BaseException:
            await self._close_client(client)
            raise
        finally:
            self._is_opening = False

    async def send(self, subject: str, payload: bytes) -> None:
        """As in `Wire`."""
        await self._make_room()
        await self._publish(subject, payload)

    async def ask(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        """As in `Wire`."""
        await self._make_room()
        answer = await self._requests.wait(
            f"no answer on {subject}",
            timeout_seconds,
            lambda reply: self._publish(subject, payload, reply),
        )
        if answer.headers:
            _raise_refusal(answer, answer.headers, subject)
        return answer.data

    async def answer(self, reply: str, payload: bytes) -> None:
        """Sent when the broker is back, if it is away: the asker may still be there."""
        await self._publish(reply, payload)

    async def refuse(self, reply: str, error: BusError) -> None:
        """As in `Wire`."""
        await self._publish(reply, str(error).encode(), headers={_ERROR_HEADER: type(error).__name__})

    async def subscribe(
        self, subject: str, queue_group: str, on_payload: OnPayload, *, answers: bool
    ) -> NatsSubscription:
        """As in `Wire`. When it returns, the broker knows of it, or will when it is back."""

        async def on_message(message: Msg) -> None:
            outcome = on_payload(message.data, message.reply)
            if outcome is not None:
                await outcome

        limit = MAX_WAITING_REQUESTS if answers else MAX_WAITING_MESSAGES
        subscription = NatsSubscription(self, subject, queue_group, on_message, limit, answers=answers)
        await self.subscribe_messages(subscription)
        return subscription

    async def subscribe_messages(self, subscription: NatsSubscription) -> None:
        """Let it take part in this connection until it is closed."""
        if self._is_closed:
            raise NotConnected("this bus is closed")
        self._subscriptions.add(subscription)
        if not self.client.is_closed:  # else `_reopen` attaches it
            await subscription.attach(self.client)
        if self.is_connected:
            with suppress(BusError):  # lost meanwhile: nats-py subscribes again by itself
                await self.round_trip(ROOM_TIMEOUT_SECONDS)

    def forget(self, subscription: NatsSubscription) -> None:
        """It is closed."""
        self._subscriptions.discard(subscription)

    def keep(self, task: asyncio.Task[None]) -> None:
        """Own a background task until it ends or the connection is closed."""
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    async def round_trip(self, timeout_seconds: float) -> None:
        """Wait until the broker has taken all that was sent before. Raises NotConnected, RequestTimedOut.

        Not nats-py's `flush`: its pong, when late, ends nats-py's reading.
        """
        if not self.is_connected:
            raise NotConnected("the broker is away")
        await self._requests.wait(
            "no echo from the broker", timeout_seconds, lambda reply: self._publish(reply, b"")
        )

    async def close(self) -> None:
        """As in `Wire`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._requests.fail_all(NotConnected("this bus is closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for subscription in [*self._subscriptions, self._answers]:
            await subscription.cancel()  # nats-py's `close` forgets them when sending what waits fails
        await self._close_client(self.client)

    async def _close_client(self, client: Client) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await client.close()
        except OSError as error:  # a TimeoutError among them
            log.warning("bus_not_flushed", broker=self._address.shown, error=repr(error))

    async def _publish(
        self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        try:
            await self.client.publish(subject, payload, reply=reply, headers=headers)
        except nats.errors.OutboundBufferLimitError as error:
            raise Overloaded(f"{self.client.pending_data_size} bytes wait for the broker") from error
        except (nats.errors.Error, OSError) as error:
            raise NotConnected(f"not sent to {subject}: {error!r}") from error

    async def _make_room(self) -> None:
        """Wait while too much is unsent, but not for long."""
        if self.client.pending_data_size < MAX_UNSENT_BYTES:
            return
        try:
            await self.round_trip(ROOM_TIMEOUT_SECONDS)
        except RequestTimedOut as error:
            raise Overloaded(f"{self.client.pending_data_size} bytes wait for the broker") from error

    async def _answer_came(self, message: Msg) -> None:
        self._requests.answer(message.subject, message)

    async def _error_came(self, error: Exception) -> None:
        if self._is_opening:
            # Ends nats-py's endless first try.
            raise NotConnected(f"no broker at {self._address.shown}: {error!r}") from error
        if isinstance(error, nats.errors.SlowConsumerError):
            await self._was_dropped(error)
        else:
            log.debug("broker_connection_failed", broker=self._address.shown, error=repr(error))

    async def _was_dropped(self, error: nats.errors.SlowConsumerError) -> None:
        self.num_dropped_total += 1
        now = asyncio.get_running_loop().time()
        if now - self._drop_logged_at >= 1.0:
            self._drop_logged_at = now
            log.warning("messages_dropped", subject=error.subject, num_dropped_total=self.num_dropped_total)
        if error.reply and any(s.answers and s.is_of(error.sub) for s in self._subscriptions):
            with suppress(BusError):
                await self.refuse(error.reply, Overloaded(f"too many requests wait on {error.subject}"))

    async def _was_lost(self) -> None:
        if self._is_opening or self._is_closed:
            return
        log.warning("broker_lost", broker=self._address.shown)
        self._requests.fail_all(NotConnected(LOST_IN_FLIGHT))
        for listener in self._on_lost:
            listener()

    async def _was_found(self) -> None:
        self.num_reconnects_total += 1
        log.info("broker_found", broker=self._address.shown)
        for listener in self._on_connected:
            listener()

    async def _was_closed(self) -> None:
        """nats-py gives up for good on some errors that the broker sends. We do not."""
        if not self._is_opening and not self._is_closed:
            log.error("broker_refused", broker=self._address.shown, error=repr(self.client.last_error))
            for subscription in self._subscriptions:
                subscription.client_gone()
            self.keep(asyncio.create_task(self._reopen(), name="bus-reopen"))

    async def _reopen(self) -> None:
        while True:
            await asyncio.sleep(RECONNECT_SECONDS)
            try:
                await self.open()
            except NotConnected as error:
                log.debug("broker_connection_failed", broker=self._address.shown, error=str(error))
            else:
                await self._was_found()
                return

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("bus_task_crashed", task=task.get_name(), exc_info=error)


def _raise_refusal(answer: Msg, headers: dict[str, str], subject: str) -> None:
    if headers.get(_STATUS_HEADER) == _NO_RESPONDERS_STATUS:
        raise NoResponders(f"nobody serves {subject}")
    if name := headers.get(_ERROR_HEADER):
        raise error_named(name, answer.data.decode("utf-8", "replace"))
