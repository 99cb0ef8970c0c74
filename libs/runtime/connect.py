"""Finding the broker at start: services come up in any order, so its absence is waited out, not an error."""

import asyncio

import structlog

from libs.bus.broker_address import read_address
from libs.bus.bus import Bus
from libs.bus.errors import BusError
from libs.bus.nats_bus import NatsBus
from libs.config.errors import BadSetting

RETRY_SECONDS = 0.5

log = structlog.get_logger()


def check_url(url: str) -> None:
    """Whether this can be a broker's address at all. Raises BadSetting."""
    try:
        read_address(url)
    except ValueError as error:
        raise BadSetting("--nats-server (or NATS_SERVER)", url, "an address like nats://host:4222") from error


async def connect_bus(url: str, name: str, stopped: asyncio.Event) -> Bus | None:
    """Connect, trying until the broker answers; None when `stopped` was set first. Raises BadSetting."""
    check_url(url)
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
