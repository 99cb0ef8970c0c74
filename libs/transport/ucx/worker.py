"""One ucp_worker in an event loop: its event fd wakes us, we progress until dry, arm it again, and sleep.

Callbacks of UCX only note what happened; it is handled after the progress call returns, where every UCX
function may be called again. Nothing here spins, so an idle worker costs nothing.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

from libs.transport.memory import Memory
from libs.transport.port import LinkLost
from libs.transport.ucx import abi
from libs.transport.ucx.operations import Done, Operation, Operations
from libs.transport.ucx.ucp_library import Library, address_of

MESSAGE_ID = 1
PROGRESS_SECONDS = 0.001
"""How long one wake-up may keep the event loop."""
FIRST_NUDGE_SECONDS, LAST_NUDGE_SECONDS = 0.002, 0.25
"""While operations are under way, progress at least this often, at ever longer intervals: the end of an
endpoint leaves work in UCX's own queue that neither the event fd nor arming tells of. Without operations
there is no timer."""
BULK_BYTES = 256 << 10
"""While more than this is under way, progress calls release the GIL."""


class Arrival(NamedTuple):
    """One active message. `descriptor` is set for a body that still lies with the sender: `fetch` or
    `discard` it."""

    envelope: bytes
    body: bytes
    num_bytes: int
    descriptor: int


class UcxWorker:
    """A worker with one endpoint. Owned by one event loop's thread. `on_failure` hears why the connection
    broke."""

    def __init__(
        self,
        library: Library,
        context: int,
        on_arrival: Callable[[Arrival], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._library, self._calls = library, library.calls
        self._on_arrival, self._on_failure = on_arrival, on_failure
        self._endpoint = 0
        self.loop = asyncio.get_running_loop()
        self._operations = Operations()
        self._events: list[Callable[[], None]] = []
        self._is_progress_due = False
        self._nudge: asyncio.TimerHandle | None = None
        self._nudge_seconds = FIRST_NUDGE_SECONDS
        self._param = abi.RequestParam(op_attr_mask=abi.OP_CALLBACK | abi.OP_USER_DATA | abi.OP_FLAGS)
        self._param_address = ctypes.addressof(self._param)
        self._open(context)

    def _open(self, context: int) -> None:
        check, calls = self._library.check, self._calls
        worker, fd = ctypes.c_void_p(), ctypes.c_int()
        params = abi.WorkerParams(field_mask=abi.WORKER_PARAM_THREAD_MODE, thread_mode=abi.THREAD_MODE_SINGLE)
        check(
            calls.ucp_worker_create(context, ctypes.byref(params), ctypes.byref(worker)), "ucp_worker_create"
        )
        self._worker = worker.value or 0
        self._callbacks = (
            abi.SendCallback(self._sent),
            abi.FetchCallback(self._fetched),
            abi.MessageCallback(self._arrived),
            abi.ErrorCallback(self._failed),
        )
        self._sent_address, self._fetched_address, arrived, self._failed_address = map(
            address_of, self._callbacks
        )
        handler = abi.MessageHandlerParam(
            field_mask=abi.AM_HANDLER_ID | abi.AM_HANDLER_FLAGS | abi.AM_HANDLER_CB,
            id=MESSAGE_ID,
            flags=abi.AM_FLAG_WHOLE_MSG,
            cb=arrived,
        )
        check(calls.ucp_worker_set_am_recv_handler(worker, ctypes.byref(handler)), "the message handler")
        check(calls.ucp_worker_get_efd(worker, ctypes.byref(fd)), "ucp_worker_get_efd")
        self.address, self.max_envelope_bytes = self._query()
        self._fd = fd.value
        self.loop.add_reader(self._fd, self._progress)
        self._progress_soon()

    def _query(self) -> tuple[bytes, int]:
        attr = abi.WorkerAttr(field_mask=abi.WORKER_ATTR_ADDRESS | abi.WORKER_ATTR_MAX_AM_HEADER)
        self._library.check(
            self._calls.ucp_worker_query(self._worker, ctypes.byref(attr)), "ucp_worker_query"
        )
        address = ctypes.string_at(attr.address, attr.address_length)
        self._calls.ucp_worker_release_address(self._worker, attr.address)
        return address, attr.max_am_header

    # What the Links ask for

    def connect(self, address: bytes) -> None:
        """Join the worker of this address. Raises LinkLost."""
        raw, endpoint = ctypes.create_string_buffer(address, len(address)), ctypes.c_void_p()
        params = abi.EndpointParams(
            field_mask=abi.EP_PARAM_REMOTE_ADDRESS
            | abi.EP_PARAM_ERR_HANDLING_MODE
            | abi.EP_PARAM_ERR_HANDLER,
            address=ctypes.addressof(raw),
            err_mode=abi.ERR_HANDLING_MODE_PEER,
            err_handler_cb=self._failed_address,
        )
        status = self._calls.ucp_ep_create(self._worker, ctypes.byref(params), ctypes.byref(endpoint))
        if status != abi.OK:
            reason = self._library.status_text(status)
            raise LinkLost(
                f"no UCX transport leads to the peer: {reason}; compare UCX_TLS and UCX_NET_DEVICES"
            )
        self._endpoint = endpoint.value or 0
        self._progress_soon()

    def send(self, envelope: bytes, body: Memory, is_rendezvous: bool, done: Done) -> None:
        """Send a message. `done` comes when `body` may be reused, perhaps before this returns."""
        self._prepare(self._sent_address, abi.AM_SEND_FLAG_RNDV if is_rendezvous else abi.AM_SEND_FLAG_EAGER)
        pointer = self._calls.ucp_am_send_nbx(
            self._endpoint,
            MESSAGE_ID,
            envelope,
            len(envelope),
            body.address,
            body.num_bytes,
            self._param_address,
        )
        self._started(pointer, Operation(done, body.num_bytes, (envelope, body)))

    def fetch(self, descriptor: int, into: Memory, num_bytes: int, done: Done) -> None:
        """Bring the body of an arrival into memory."""
        self._prepare(self._fetched_address, 0)
        pointer = self._calls.ucp_am_recv_data_nbx(
            self._worker, descriptor, into.address, num_bytes, self._param_address
        )
        self._started(pointer, Operation(done, num_bytes, into))

    def discard(self, descriptor: int) -> None:
        """Let go of an arrival's body without fetching it."""
        self._calls.ucp_am_data_release(self._worker, descriptor)
        self._progress_soon()

    async def close(self) -> None:
        """Let what is under way end, however long that takes, and free the worker, and with it the
        connection.

        UCX corrupts the heap when a worker is destroyed under its operations. With a stopped peer that does
        not read its socket they end when it goes on or dies.
        """
        await self._operations.wait_dry()
        if self._worker:
            self._calls.ucp_worker_destroy(self.abandon())

    def abandon(self) -> int:
        """Progress no more and free nothing, for a process that ends before its operations do. The handle."""
        self.loop.remove_reader(self._fd)
        if self._nudge is not None:
            self._nudge.cancel()
        worker, self._worker = self._worker, 0
        return worker

    # Operations

    def _prepare(self, callback: int, flags: int) -> None:
        self._param.cb, self._param.flags = callback, flags
        self._param.user_data = self._operations.next_number

    def _started(self, pointer: int | None, operation: Operation) -> None:
        if not pointer:
            operation.done(abi.OK)
        elif pointer > (1 << 64) + abi.ERR_LAST:
            operation.done(pointer - (1 << 64))
        else:
            self._operations.begin(operation)
            self._progress_soon()

    def _end_operation(self, number: int, status: int) -> None:
        operation = self._operations.end(number)
        operation.done(status)

    # Callbacks of UCX

    def _sent(self, request: int, status: int, user_data: int) -> None:
        self._calls.ucp_request_free(request)
        self._events.append(lambda: self._end_operation(user_data, status))

    def _fetched(self, request: int, status: int, _length: int, user_data: int) -> None:
        self._calls.ucp_request_free(request)
        self._events.append(lambda: self._end_operation(user_data, status))

    def _arrived(
        self, _arg: int, header: int, header_bytes: int, data: int, num_bytes: int, param: int
    ) -> int:
        envelope = ctypes.string_at(header, header_bytes) if header_bytes else b""
        if ctypes.c_uint64.from_address(param).value & abi.AM_RECV_ATTR_FLAG_RNDV:
            arrival = Arrival(envelope, b"", num_bytes, data)
            self._events.append(lambda: self._on_arrival(arrival))
            return abi.INPROGRESS
        arrival = Arrival(envelope, ctypes.string_at(data, num_bytes) if num_bytes else b"", num_bytes, 0)
        self._events.append(lambda: self._on_arrival(arrival))
        return abi.OK

    def _failed(self, _arg: int, _endpoint: int, status: int) -> None:
        self._events.append(lambda: self._on_failure(self.status_text(status)))

    def status_text(self, status: int) -> str:
        """UCX's words for a status."""
        return self._library.status_text(status)

    # Progress

    def _progress_soon(self) -> None:
        if not self._is_progress_due:
            self._is_progress_due = True
            self.loop.call_soon(self._progress)

    def _progress(self) -> None:
        self._is_progress_due = False
        deadline = time.perf_counter() + PROGRESS_SECONDS
        while self._worker:
            functions = self._library.bulk if self._operations.num_bytes > BULK_BYTES else self._calls
            is_dry = not functions.ucp_worker_progress(self._worker)
            if self._events:
                self._handle_events()
                self._nudge_seconds = FIRST_NUDGE_SECONDS
            elif is_dry and self._arm():
                self._nudge_later()
                return
            if time.perf_counter() > deadline:
                self._progress_soon()
                return

    def _nudge_later(self) -> None:
        if self._operations and self._nudge is None:
            self._nudge = self.loop.call_later(self._nudge_seconds, self._on_nudge)

    def _on_nudge(self) -> None:
        self._nudge = None
        self._nudge_seconds = min(2 * self._nudge_seconds, LAST_NUDGE_SECONDS)
        self._progress()

    def _handle_events(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event()

    def _arm(self) -> bool:
        status = self._calls.ucp_worker_arm(self._worker)
        if status not in (abi.OK, abi.ERR_BUSY):
            self._on_failure(f"arming the worker: {self.status_text(status)}")
        return bool(status != abi.ERR_BUSY)
