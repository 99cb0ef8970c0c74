"""How fast the bus is on this machine: the mesh's own messages through a real broker on loopback."""

import asyncio
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

from libs.bus.errors import BusError
from libs.bus.messages.generation import Place, Placed, Refused, TokenDelta, TokenFrame
from libs.bus.nats_bus import NatsBus
from tests.bench.figures import Figure, Say
from tests.doubles.nats_process import NatsServer

NUM_REQUESTS = 2000
NUM_IN_FLIGHT = 16
NUM_FRAMES = 20_000
NUM_SEQUENCES = 16
"""What a decode worker's batch tells one gateway per step."""

_PLACE = Place(request_id="bench", num_tokens=512, max_new_tokens=64, deadline_unix_seconds=0.0)
_FRAME = TokenFrame(
    worker="0123456789abcdef",
    deltas=[TokenDelta(f"request-{i:016x}", 100, (i,)) for i in range(NUM_SEQUENCES)],
)


def measure_bus(say: Say) -> list[Figure]:
    """Messages of the mesh through a broker of its own."""
    say("requests and publishes over NATS")
    return [Figure(name, value, "") for name, value in asyncio.run(measure()).items()]


async def measure() -> dict[str, float]:
    """Seconds of a placement's round trip, rates of placements and of token frames, and for how many seconds
    a restarted broker keeps an asker from its next answer."""
    with tempfile.TemporaryDirectory() as state_dir:
        server = NatsServer(Path(state_dir))
        await server.start()
        asker, answerer = await NatsBus.connect(server.url), await NatsBus.connect(server.url)
        try:
            await answerer.serve(Place, _place)
            return {
                **await _measure_requests(asker),
                **await _measure_frames(asker, answerer),
                "restart_seconds": await _measure_restart(server, asker),
            }
        finally:
            await asker.close()
            await answerer.close()
            await server.stop()


async def _place(place: Place) -> Placed | Refused:
    return Placed(prefill="", decode=place.request_id)


async def _measure_requests(asker: NatsBus) -> dict[str, float]:
    seconds: list[float] = []
    for _ in range(NUM_REQUESTS):
        begun = perf_counter()
        await asker.request(_PLACE, timeout_seconds=5.0)
        seconds.append(perf_counter() - begun)
    percentiles = statistics.quantiles(seconds, n=100)

    async def ask_share() -> None:
        for _ in range(NUM_REQUESTS // NUM_IN_FLIGHT):
            await asker.request(_PLACE, timeout_seconds=5.0)

    begun = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_IN_FLIGHT):
            group.create_task(ask_share())
    return {
        "request_p50_seconds": percentiles[49],
        "request_p99_seconds": percentiles[98],
        "requests_per_second_16_in_flight": NUM_REQUESTS / (perf_counter() - begun),
    }


async def _measure_frames(sender: NatsBus, listener: NatsBus) -> dict[str, float]:
    all_came = asyncio.Event()
    num_came = 0

    def hear(_: TokenFrame) -> None:
        nonlocal num_came
        num_came += 1
        if num_came == NUM_FRAMES:
            all_came.set()

    begun = perf_counter()
    for _ in range(NUM_FRAMES):
        await sender.publish(_FRAME, to="nobody")
    await sender.request(_PLACE, timeout_seconds=30.0)  # comes back when the broker has taken all before it
    published_seconds = perf_counter() - begun
    subscription = await listener.subscribe(TokenFrame, hear, at="gateway")
    begun = perf_counter()
    for number in range(NUM_FRAMES):
        await sender.publish(_FRAME, to="gateway")
        if number % 64 == 63:
            await asyncio.sleep(0)  # both ends share this thread
    async with asyncio.timeout(30.0):
        await all_came.wait()
    delivered_seconds = perf_counter() - begun
    await subscription.close()
    return {
        "frames_published_per_second": NUM_FRAMES / published_seconds,
        "frames_delivered_per_second": NUM_FRAMES / delivered_seconds,
    }


async def _measure_restart(server: NatsServer, asker: NatsBus) -> float:
    """From the broker being ready again to the first answer."""
    await server.stop()
    await server.start()
    begun = perf_counter()
    while True:
        try:
            await asker.request(_PLACE, timeout_seconds=5.0)
            return perf_counter() - begun
        except BusError:
            await asyncio.sleep(0.01)
