"""Finding the broker at start: services come up in any order, so its absence is waited out, not an error."""

import asyncio

import structlog

from libs.bus.nats_bus import NatsBus
from libs.bus.port import Bus, BusError

RETRY_SECONDS = 0.5

log = structlog.get_logger()


async def connect_bus(url: str, name: str, stopped: asyncio.Event) -> Bus | None:
    """Connect, trying until the broker answers; None when `stopped` was set before it did."""
    is_first_failure = True
    while not stopped.is_set():
        try:
            return await NatsBus.connect(url, name=name)
        except BusError as error:
            if is_first_failure:
                log.warning("broker_awaited", nats_server=url, error=str(error))
            is_first_failure = False
        try:
            async with asyncio.timeout(RETRY_SECONDS):
                await stopped.wait()
        except TimeoutError:
            pass
    return None
