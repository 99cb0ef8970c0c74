"""Links that carry the calls of hosted modules, at both ends, on the loop of the thread that makes them."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from libs.engine.hosting.hosting import Hosting
from libs.engine.hosting.port import HostLost
from libs.engine.thread_loop import ThreadLoop
from libs.transport.port import LinkError, LinkLost, Listener, Transport
from libs.worker.migration.host.calls import OwnerCalls
from libs.worker.migration.owner.remote_host import HostCalls
from libs.worker.migration.threads import LoopEnded, run_on_loop

_CLOSE_SECONDS = 4.0
"""A silent peer is given up before."""


class CallLinks:
    """One transport, which lives on the loop that the engine's thread turns, so that a call is sent, heard,
    done and answered without a change of thread. It ends with `close` or with the loop. Methods are for any
    loop."""

    def __init__(
        self,
        thread_loop: ThreadLoop | None,
        open_transport: Callable[[], Transport],
        *,
        wake: Callable[[], None],
        timeout_seconds: float,
        on_call_done: Callable[[float], None],
        on_hosted_call_done: Callable[[float], None],
    ) -> None:
        """`open_transport` is called on the loop, `wake` with each answer of a host. Calls to hosts and of
        owners are timed apart. Without a `thread_loop` all is on the running loop, and the transport
        somebody else's to close."""
        self._thread_loop, self._open_transport, self._wake = thread_loop, open_transport, wake
        self._loop = asyncio.get_running_loop() if thread_loop is None else thread_loop.loop
        self._timeout_seconds = timeout_seconds
        self._on_call_done, self._on_hosted_call_done = on_call_done, on_hosted_call_done
        self._transport: Transport | None = None
        self._listener: Listener | None = None
        self._owners: dict[str, OwnerCalls] = {}
        self._is_closed = False
        if thread_loop is not None:
            thread_loop.at_end(self._close)

    @property
    def address(self) -> str:
        """Where owners' calls come to, for presence; empty where none are taken."""
        return "" if self._listener is None else self._listener.address

    def num_open_links(self) -> int:
        """For the gauge."""
        return 0 if self._transport is None else self._transport.num_open_links()

    async def listen(self, host: str) -> None:
        """From now on there is an `address`. Raises ListenFailed."""
        await run_on_loop(self._loop, self._listen(host))

    async def accept(self, hosting: Hosting) -> None:
        """Take calls of owners, until the listener closes or the loop ends."""
        with suppress(LoopEnded, LinkLost):
            await run_on_loop(self._loop, self._accept(hosting))

    async def connect(
        self, worker: str, address: str, on_lost: Callable[[HostCalls, str], None]
    ) -> HostCalls:
        """To the host with this incarnation. `on_lost` hears on the caller's loop why the Link is over.
        Raises HostLost."""
        own_loop = asyncio.get_running_loop()

        def hear_lost(calls: HostCalls, why: str) -> None:
            with suppress(RuntimeError):  # the worker has ended, and nobody is left to tell
                own_loop.call_soon_threadsafe(on_lost, calls, why)

        connecting = asyncio.create_task(run_on_loop(self._loop, self._connect(worker, address, hear_lost)))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._drop_unwanted)
            raise
        except (LinkError, LoopEnded) as error:
            raise HostLost(worker, f"its calls have no Link: {error}") from error

    async def drop(self, calls: HostCalls) -> None:
        """Cut the Link to a host."""
        calls.lose("this side closed the Link")
        with suppress(LoopEnded):  # and all Links with it
            await run_on_loop(self._loop, calls.close())

    async def close(self) -> None:
        """Cut all Links; what a busy thread has no time for, it does at its end. Idempotent."""
        with suppress(LoopEnded, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await run_on_loop(self._loop, self._close())

    def _drop_unwanted(self, connecting: asyncio.Task[HostCalls]) -> None:
        if not connecting.cancelled() and connecting.exception() is None:
            calls = connecting.result()
            calls.lose("nobody waits for this Link any more")
            with suppress(RuntimeError):  # the loop has ended, and all Links with it
                self._loop.call_soon_threadsafe(lambda: self._loop.create_task(calls.close()))

    def _opened(self) -> Transport:
        if self._is_closed:
            raise LinkLost("no more calls are made or taken here")
        if self._transport is None:
            self._transport = self._open_transport()
        return self._transport

    async def _listen(self, host: str) -> None:
        self._listener = await self._opened().listen(host)

    async def _accept(self, hosting: Hosting) -> None:
        while self._listener is not None:
            link = await self._listener.accept()
            if (before := self._owners.get(link.peer)) is not None:
                before.close()  # what still comes over it would mix with what the newer one brings
            owner = OwnerCalls(
                link,
                hosting,
                send_timeout_seconds=self._timeout_seconds,
                on_call_done=self._on_hosted_call_done,
                on_over=self._owner_over,
            )
            if link.is_open:
                self._owners[link.peer] = owner

    def _owner_over(self, owner: OwnerCalls) -> None:
        if self._owners.get(owner.name) is owner:
            del self._owners[owner.name]

    async def _connect(
        self, worker: str, address: str, on_lost: Callable[[HostCalls, str], None]
    ) -> HostCalls:
        link = await self._opened().connect(
            address, expected_peer=worker, timeout_seconds=self._timeout_seconds
        )
        return HostCalls(
            link,
            wake=self._wake,
            on_call_done=self._on_call_done,
            on_lost=on_lost,
            timeout_seconds=self._timeout_seconds,
        )

    async def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._listener is not None:
            await self._listener.close()
        if self._transport is not None and self._thread_loop is not None:
            await self._transport.close()
