"""The UCX context of one transport and its workers, one for each Link.

A worker is what can be freed as a whole: UCX pairs the endpoints of two shared workers by the order in which
they were made, so that Links between the same two could be crossed; and in UCX 1.22 closing a TCP endpoint
that still sends crashes the worker that goes on. A worker costs 2 ms, 75 KiB and 6 descriptors over TCP.
"""

import asyncio
from collections.abc import Callable

from libs.transport.ucx.ucp_library import Library, UcxUnavailable, load_library
from libs.transport.ucx.worker import Arrival, UcxWorker

CLOSE_SECONDS = 1.0

_abandoned: list[UcxWorker] = []
"""Kept alive until the process ends, since UCX holds pointers into them; see `UcxContext.close`."""


class UcxContext:
    """Opened when first needed."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._context = 0
        self._retiring: dict[asyncio.Task[None], UcxWorker] = {}
        self.num_workers = 0

    def make_worker(
        self,
        min_envelope_bytes: int,
        on_arrival: Callable[[Arrival], None],
        on_failure: Callable[[str], None],
    ) -> UcxWorker:
        """A worker for one Link. Raises UcxUnavailable."""
        if self._library is None:
            self._library = load_library()
            self._context = self._library.open_context()
        worker = UcxWorker(self._library, self._context, on_arrival, on_failure)
        self.num_workers += 1
        if worker.max_envelope_bytes < min_envelope_bytes:
            self.retire(worker)
            raise UcxUnavailable(
                f"UCX takes headers of {worker.max_envelope_bytes} bytes and we need {min_envelope_bytes};"
                " choose other transports with UCX_TLS"
            )
        return worker

    def retire(self, worker: UcxWorker) -> None:
        """Its Link is over; free it as soon as nothing is under way on it."""
        task = worker.loop.create_task(worker.close())
        self._retiring[task] = worker
        task.add_done_callback(self._retired)

    def _retired(self, task: "asyncio.Task[None]") -> None:
        self._retiring.pop(task)
        self.num_workers -= 1

    async def close(self) -> None:
        """Free everything but what stopped peers hold on to. Idempotent. All Links are over before."""
        if self._retiring:
            await asyncio.wait(self._retiring, timeout=CLOSE_SECONDS)
        is_held = bool(self._retiring)
        for task, worker in tuple(self._retiring.items()):
            task.cancel()
            worker.abandon()
            _abandoned.append(worker)
        context, self._context = self._context, 0
        if self._library is not None and context and not is_held:
            self._library.calls.ucp_cleanup(context)
        self._library = None
