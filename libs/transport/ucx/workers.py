"""Which worker carries a Link. UCX pairs the endpoints of two workers by the order in which they were made,
so two Links between the same two workers could be crossed, and the end of one would break the other.
Therefore two workers are joined at most once: each further Link with the same peer takes another worker.
Usually there is one."""

import asyncio

from libs.transport.ucx.library import Library, UcxUnavailable, load_library
from libs.transport.ucx.wire import ENVELOPE_BYTES, UcxWire, token_of
from libs.transport.ucx.worker import Arrival, UcxWorker

CLOSE_SECONDS = 1.0

_abandoned: "list[SharedWorker]" = []
"""Kept alive, since UCX holds pointers into them; see `Workers.close`."""


class SharedWorker:
    """A worker, the Links on it, and the incarnations it ever met."""

    def __init__(self, library: Library, context: int) -> None:
        self.met: set[str] = set()
        self.wires: dict[int, UcxWire] = {}
        self.ucx = UcxWorker(library, context, self._on_arrival)

    def _on_arrival(self, arrival: Arrival) -> None:
        token = token_of(arrival.envelope)
        wire = self.wires.get(token) if token is not None else None
        if wire is not None:
            wire.on_arrival(arrival)
        elif arrival.descriptor:
            self.ucx.discard(arrival.descriptor)  # late words of a Link that is over, or a stranger's


class Workers:
    """All workers of one transport; opened when first needed, each freed with its last Link."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._context = 0
        self._workers: list[SharedWorker] = []
        self._closing: dict[asyncio.Task[None], SharedWorker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def for_peer(self, incarnation: str) -> SharedWorker:
        """A worker that never met this peer. Raises UcxUnavailable."""
        if self._library is None:
            self._library = load_library()
            self._context = self._library.open_context()
        worker = next((worker for worker in self._workers if incarnation not in worker.met), None)
        if worker is None:
            worker = SharedWorker(self._library, self._context)
            self._workers.append(worker)
            if worker.ucx.max_envelope_bytes < ENVELOPE_BYTES:
                raise UcxUnavailable(
                    f"UCX takes headers of {worker.ucx.max_envelope_bytes} bytes, we need {ENVELOPE_BYTES};"
                    " choose other transports with UCX_TLS"
                )
        worker.met.add(incarnation)
        return worker

    def release(self, worker: SharedWorker) -> None:
        """A Link on it is over; free it with the last one."""
        if not worker.wires and worker in self._workers:
            self._workers.remove(worker)
            task = asyncio.get_running_loop().create_task(worker.ucx.close())
            self._closing[task] = worker
            task.add_done_callback(self._closing.pop)

    async def close(self) -> None:
        """Free everything, but what a peer holds on to. Idempotent. All Links are closed before."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_SECONDS)
        for task, worker in tuple(self._closing.items()):
            task.cancel()
            worker.ucx.abandon()
            _abandoned.append(worker)
        context, self._context = self._context, 0
        if self._library is not None and context and not self._closing:
            self._library.calls.ucp_cleanup(context)
        self._library = None
