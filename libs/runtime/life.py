"""The one way a service lives: open, ready, serve, drain, close."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

import structlog

from libs.bus.errors import BusError
from libs.bus.messages.presence import ServiceState
from libs.config.errors import SettingsError
from libs.config.load import EXIT_BAD_SETTINGS
from libs.cost.load import WorkerLoad
from libs.runtime.heartbeat import beat, keep_reporting_load, report_load
from libs.runtime.runtime import Runtime, end_tasks

CLOSE_TIMEOUT_SECONDS = 10.0
EXIT_CRASHED = 1

log = structlog.get_logger()


class Service(Protocol):
    """A program of the mesh, as its runtime sees it. `close` is called once, also after a failed `open`."""

    async def open(self, runtime: Runtime) -> None:
        """Acquire everything; return when work can be taken. Slow ones call `runtime.progress`.

        A SettingsError ends the process with exit code 2: what was asked for cannot be had.
        """
        ...

    async def drain(self) -> None:
        """Take no new work; return when the work in progress has ended. Cancelled at the drain timeout."""
        ...

    async def close(self) -> None:
        """Free everything, in reverse order."""
        ...


@runtime_checkable
class ReportsLoad(Protocol):
    """A service that others place work on."""

    def load(self) -> WorkerLoad:
        """A cheap snapshot, called a few times a second on the loop once the service is open."""
        ...


class Stop:
    """Why and how the service is to end: set by signals, or by a test."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.skip_drain = False
        """Nobody waits for the work in progress any more: the parent is dead."""


async def live(
    service: Service,
    runtime: Runtime,
    stop: Stop,
    *,
    drain_timeout_seconds: float,
    on_opened: Callable[[], None] = lambda: None,
) -> int:
    """Live one life; returns the exit code: 0 when asked to end, 1 when something broke and was logged.

    `on_opened` is called when the service is open, before others hear that it is ready.
    """
    ended = asyncio.Event()
    heartbeat = asyncio.create_task(beat(runtime, ended), name="heartbeat")
    try:
        if (exit_code := await _open(service, runtime, stop)) is not None:
            return exit_code
        on_opened()
        exit_code = await _serve(service, runtime, stop)
        if exit_code == 0 and not stop.skip_drain:
            runtime.become(ServiceState.DRAINING)
            await _bounded("drain", service.drain(), drain_timeout_seconds)
        return exit_code
    finally:
        runtime.become(ServiceState.DRAINING, "closing")
        await runtime.cancel_spawned()
        await _bounded("close", service.close(), CLOSE_TIMEOUT_SECONDS)
        ended.set()
        await end_tasks([heartbeat])
        await _bounded("good-bye", _say_good_bye(runtime), 1.0)


async def _open(service: Service, runtime: Runtime, stop: Stop) -> int | None:
    """None once it is open, else the exit code. Being asked to stop meanwhile ends the opening."""
    opening = asyncio.create_task(service.open(runtime), name="open")
    await _first(opening, stop.asked.wait(), runtime.wait_crashed())
    if not opening.done():
        await end_tasks([opening])
        return 0 if stop.asked.is_set() else EXIT_CRASHED
    error = opening.exception()
    if isinstance(error, SettingsError):
        log.error("settings_refused", error=str(error))
        return EXIT_BAD_SETTINGS
    if error:
        log.error("service_not_opened", error=str(error), exc_info=error)
        return EXIT_CRASHED
    return None


async def _serve(service: Service, runtime: Runtime, stop: Stop) -> int:
    """Serve until asked to stop, or until a background task crashes; returns the exit code."""
    if isinstance(service, ReportsLoad):
        # Before others hear that it is ready: no work is placed on a worker whose load is unknown.
        await report_load(runtime, service.load, 1)
        runtime.spawn("load-report", keep_reporting_load(runtime, service.load, 2))
    runtime.become(ServiceState.READY)
    await _first(stop.asked.wait(), runtime.wait_crashed())
    return 0 if stop.asked.is_set() else EXIT_CRASHED


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait until one of them is done; the waiting for the others ends, a given task itself goes on."""
    futures = [asyncio.ensure_future(a) for a in awaitables]
    given = {f for f, a in zip(futures, awaitables, strict=True) if f is a}
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    for future in futures:
        if future not in given:
            future.cancel()


async def _bounded(what: str, work: Awaitable[None], timeout_seconds: float) -> None:
    """An ending step: its failure or lateness is logged and does not keep the next steps from being taken."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await work
    except TimeoutError:
        log.warning("step_timed_out", step=what, timeout_seconds=timeout_seconds)
    except Exception:
        log.exception("step_failed", step=what)


async def _say_good_bye(runtime: Runtime) -> None:
    try:
        await runtime.bus.delete_presence(runtime.incarnation)
    except BusError as error:
        log.info("presence_not_deleted", error=str(error))
