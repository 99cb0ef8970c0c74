"""Links between two processes, measured: idle cost, round trip, bandwidth, how soon a death is seen. Beside
them, in the same run, a plain asyncio socket and memcpy."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from libs.transport.choose import TransportKind, make_transport
from libs.transport.memory import Bytes, as_memory, copy_to_host
from libs.transport.port import Link, LinkLost
from tests.bench.figures import Figure, Say
from tests.bench.link_peer import (
    BODY_MIB,
    DEADLINE_SECONDS,
    ECHO,
    MIB,
    NUM_ROUND_TRIPS,
    NUM_WARM_UPS,
    ROUND_TRIP_BYTES,
    SECRET,
    SINK,
    TELL,
    measure_socket,
    num_bodies,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

NUM_IN_FLIGHT = 3
IDLE_SECONDS = 2.0
HOP_KIB = 40
"""What a step of 16 sequences sends to a host that attends with two of three KV heads in float32."""


PEERS = {"ucx": "plain socket", "shm": "memcpy"}
AT_LEAST = {"ucx: 16 MiB, GB/s": 3.5, "shm: 16 MiB, GB/s": 8.0}
AT_MOST = {
    "ucx: 64 B round trip p50, us": 120.0,
    "ucx: idle CPU with a receive pending, percent": 1.0,
    "shm: idle CPU with a receive pending, percent": 1.0,
    "ucx: death of the peer seen after, s": 1.0,
    "shm: death of the peer seen after, s": 1.0,
}


def measure_links(say: Say) -> list[Figure]:
    """Starts second processes of its own and ends them; about 20 s. UCX over tcp is compared with a plain
    socket, shared memory with memcpy."""
    say("Links over UCX and shared memory, with a second process")
    measured = asyncio.run(_measure())
    return [_figure(name, measured) for name in measured]


def _figure(name: str, measured: dict[str, float]) -> Figure:
    kind, _, what = name.partition(": ")
    title, _, unit = name.rpartition(", ")
    peer = PEERS.get(kind, "")
    return Figure(
        title,
        measured[name],
        unit,
        reference=measured.get(f"{peer}: {what}"),
        reference_name=peer,
        at_least=AT_LEAST.get(name),
        at_most=AT_MOST.get(name),
    )


async def _measure() -> dict[str, float]:
    figures: dict[str, float] = {}
    kinds: tuple[TransportKind, ...] = ("ucx", "shm")
    for kind in kinds:
        async with other_process(kind) as (process, address):
            transport = make_transport(kind, f"bench-{os.getpid()}", SECRET)
            link = await transport.connect(address, timeout_seconds=DEADLINE_SECONDS)
            figures |= await _named(kind, _measure_link(link, process))
            await transport.close()
    async with other_process("socket") as (_, address):
        figures |= await _named("plain socket", measure_socket(address, _round_trips))
    return figures | {f"memcpy: {mib} MiB, GB/s": _memcpy_gigabytes_per_second(mib) for mib in BODY_MIB}


async def _named(prefix: str, measuring: Awaitable[dict[str, float]]) -> dict[str, float]:
    return {f"{prefix}: {name}": value for name, value in (await measuring).items()}


@asynccontextmanager
async def other_process(kind: str) -> "AsyncGenerator[tuple[asyncio.subprocess.Process, str]]":
    """A second process that serves Links of this kind, or a plain socket; and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.link_peer", kind, stdout=asyncio.subprocess.PIPE
    )
    try:
        if process.stdout is None:
            raise RuntimeError("a pipe was asked for")
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _measure_link(link: Link, process: asyncio.subprocess.Process) -> dict[str, float]:
    async def echo(body: Bytes) -> None:
        await link.send(ECHO, body, timeout_seconds=DEADLINE_SECONDS)
        (await link.receive(timeout_seconds=DEADLINE_SECONDS)).release()

    figures = await _round_trips(partial(echo, np.ones(ROUND_TRIP_BYTES, dtype=np.uint8)))
    hop = np.ones(HOP_KIB << 10, dtype=np.uint8)
    figures |= await _round_trips(partial(echo, hop), f"{HOP_KIB} KiB")
    for mib in BODY_MIB:
        figures[f"{mib} MiB, GB/s"] = await _stream(link, mib)
    pending = asyncio.ensure_future(link.receive())
    figures["idle CPU with a receive pending, percent"] = await _idle_cpu_percent(process.pid)
    killed_at = time.perf_counter()
    process.send_signal(signal.SIGKILL)
    try:
        await asyncio.wait_for(pending, DEADLINE_SECONDS)
    except LinkLost:
        figures["death of the peer seen after, s"] = time.perf_counter() - killed_at
    return figures


async def _round_trips(
    round_trip: Callable[[], Awaitable[None]], size: str = f"{ROUND_TRIP_BYTES} B"
) -> dict[str, float]:
    seconds: list[float] = []
    for _ in range(NUM_WARM_UPS + NUM_ROUND_TRIPS):
        begun = time.perf_counter()
        await round_trip()
        seconds.append(time.perf_counter() - begun)
    p50, p99 = np.percentile(seconds[NUM_WARM_UPS:], (50, 99)) * 1e6
    return {f"{size} round trip p50, us": float(p50), f"{size} round trip p99, us": float(p99)}


async def _stream(link: Link, mib: int) -> float:
    bodies = [np.full(mib * MIB, i, dtype=np.uint8) for i in range(NUM_IN_FLIGHT)]

    async def send_all(num_frames: int) -> float:
        begun = time.perf_counter()
        queue = list(range(num_frames))

        async def send_some(body: Bytes) -> None:
            while queue:
                queue.pop()
                await link.send(SINK, body, timeout_seconds=DEADLINE_SECONDS)

        await asyncio.gather(*(send_some(body) for body in bodies))
        await link.send(TELL, timeout_seconds=DEADLINE_SECONDS)
        (await link.receive(timeout_seconds=DEADLINE_SECONDS)).release()
        return time.perf_counter() - begun

    num_frames = num_bodies(mib)
    await send_all(NUM_IN_FLIGHT * 2)  # fills the pools
    return num_frames * mib * MIB / await send_all(num_frames) / 1e9


async def _idle_cpu_percent(pid: int) -> float:
    pids = (os.getpid(), pid)
    before = [_cpu_seconds(each) for each in pids]
    await asyncio.sleep(IDLE_SECONDS)
    return max(_cpu_seconds(each) - b for each, b in zip(pids, before, strict=True)) / IDLE_SECONDS * 100


def _cpu_seconds(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def _memcpy_gigabytes_per_second(mib: int) -> float:
    source, target = as_memory(np.ones(mib * MIB, dtype=np.uint8)), np.ones(mib * MIB, dtype=np.uint8)
    num_copies = num_bodies(mib)
    begun = time.perf_counter()
    for _ in range(num_copies):
        copy_to_host(source, target)
    return num_copies * target.nbytes / (time.perf_counter() - begun) / 1e9
