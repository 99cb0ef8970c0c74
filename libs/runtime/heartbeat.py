"""Heartbeats: this process lives, in this state and under this load."""

import asyncio
import itertools
from collections.abc import Callable

import msgspec
import structlog

from libs.bus.errors import BusError
from libs.bus.messages.presence import LoadReport
from libs.cost.load import WorkerLoad
from libs.runtime.runtime import Runtime

HEARTBEAT_SECONDS = 0.5
LOAD_REPORT_SECONDS = 0.25
MIN_LOAD_GAP_SECONDS = 0.02
"""A load that jumps all the time is reported at most this often."""

log = structlog.get_logger()


async def beat(runtime: Runtime, ended: asyncio.Event) -> None:
    """Put this process's presence every half second and at once when it changes.

    A broker that is away, or that came back empty, needs nothing special: the next beat puts the entry again.
    Ends soon after `ended` is set: a bus may swallow a cancellation; one beat more would undo the good-bye.
    """
    changed = asyncio.Event()
    runtime.on_presence_changed(changed.set)
    was_heard = True
    while not ended.is_set():
        changed.clear()
        try:
            await runtime.bus.put_presence(runtime.incarnation, msgspec.msgpack.encode(runtime.presence))
            if not was_heard:
                log.info("presence_restored")
            was_heard = True
        except BusError as error:
            if was_heard:
                log.warning("presence_not_put", error=str(error))
            was_heard = False
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await changed.wait()
        except TimeoutError:
            pass


async def report_load(runtime: Runtime, load: Callable[[], WorkerLoad], sequence: int) -> None:
    """Publish `load()` once, as report number `sequence`; a broker that is away misses it."""
    report = LoadReport(
        kind=runtime.presence.kind, incarnation=runtime.incarnation, sequence=sequence, load=load()
    )
    try:
        await runtime.bus.publish(report)
    except BusError as error:
        log.debug("load_not_reported", error=str(error))


async def keep_reporting_load(runtime: Runtime, load: Callable[[], WorkerLoad], sequence: int) -> None:
    """Report four times a second and soon after `runtime.load_changed()`, from number `sequence` on."""
    for number in itertools.count(sequence):
        await asyncio.sleep(MIN_LOAD_GAP_SECONDS)
        await runtime.wait_load_changed(LOAD_REPORT_SECONDS - MIN_LOAD_GAP_SECONDS)
        await report_load(runtime, load, number)
