"""The KV store as workers see it, against the Link itself; and the index at millions of blocks.

The store is a process of its own, with a real broker. What is measured of it takes turns with the bare Link
between two processes, frames of the same size. Of the rounds of each the best counts; of the shares, which
each round gives anew, the median.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry, Counter

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.bus.nats_bus import NatsBus
from libs.kv.block_tree import MEMORY, BlockTree
from libs.kv.layer_groups import layers_per_frame
from libs.kv.names import NAME_BYTES
from libs.kv.tensors import BlockShape
from libs.transport.choose import make_transport
from libs.transport.frames import Fetch, Fetched, decode_header, encode_header
from libs.transport.memory import Bytes
from libs.transport.port import Link
from libs.worker.stores.metrics import StoreMetrics
from libs.worker.stores.store_link import FetchResult, StoreLink
from libs.worker.stores.upload_part import UploadPart
from tests.bench.figures import Figure, Say
from tests.bench.link_peer import DEADLINE_SECONDS, SECRET, SINK, TELL
from tests.bench.links import other_process
from tests.doubles.nats_process import NatsServer

NUM_LAYERS = 30
SHAPE = BlockShape(num_kv_heads=3, block_size=16, head_dim=64, dtype=torch.bfloat16)
GET_BLOCKS = 512
PUT_BLOCKS, PUTS_PER_ROUND = 32, 8
PUT_LAYERS = layers_per_frame(NUM_LAYERS, PUT_BLOCKS * SHAPE.num_bytes)
GET_FRAME_BYTES = layers_per_frame(NUM_LAYERS, GET_BLOCKS * SHAPE.num_bytes) * GET_BLOCKS * SHAPE.num_bytes
PUT_FRAME_BYTES = PUT_LAYERS * PUT_BLOCKS * SHAPE.num_bytes
ROUNDS = 7
NUM_IN_FLIGHT = 3

MIB = 1 << 20
NUM_NAMES, CHAIN_BLOCKS, NUM_LOOKUPS = 5_000_000, 1000, 300


def measure_store(say: Say) -> list[Figure]:
    """About a minute; half of it fills the index."""
    figures = asyncio.run(_measure_rates(say))
    say(f"an index of {NUM_NAMES / 1e6:g} million blocks")
    return [*figures, *measure_index()]


async def _measure_rates(say: Say) -> list[Figure]:
    say("a store and a bare Link, each in a process of its own")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = NatsServer(folder)
        await server.start()
        stack.push_async_callback(server.stop)
        store_address = await stack.enter_async_context(_store(server.url))
        _, peer_address = await stack.enter_async_context(other_process("ucx"))
        transport = make_transport("ucx", f"bench-{os.getpid()}", SECRET)
        stack.push_async_callback(transport.close)
        bare = await transport.connect(peer_address, timeout_seconds=DEADLINE_SECONDS)
        gets = await transport.connect(store_address, timeout_seconds=DEADLINE_SECONDS)
        puts = await transport.connect(store_address, timeout_seconds=DEADLINE_SECONDS)
        return await _compare(say, bare, gets, puts)


async def _compare(say: Say, bare: Link, gets: Link, puts: Link) -> list[Figure]:
    metrics = StoreMetrics(
        CollectorRegistry(), Counter("bytes", "Of the bench.", ["direction"], registry=CollectorRegistry())
    )
    worker = StoreLink(puts, SHAPE, NUM_LAYERS, metrics, send_timeout_seconds=DEADLINE_SECONDS)
    serving = asyncio.create_task(worker.serve())
    blocks = torch.randint(0, 100, (PUT_LAYERS * PUT_BLOCKS, SHAPE.num_bytes // 2), dtype=torch.int16)
    say("putting until memory has been used once")
    for _ in range(6):
        await _put_round(worker, blocks)
    rates: dict[str, list[float]] = {"put": [], "put link": [], "get": [], "get link": [], "fetch": []}
    names: list[bytes] = []
    say("puts, gets and the bare Link in turns")
    for _ in range(ROUNDS):
        rate, names = await _put_round(worker, blocks)
        rates["put"].append(rate)
        rates["put link"].append(await _bare_rate(bare, PUT_FRAME_BYTES))
        wanted = (names * (GET_BLOCKS // len(names)))[:GET_BLOCKS]
        rates["get"].append(await _get_rate(gets, wanted))
        rates["get link"].append(await _bare_rate(bare, GET_FRAME_BYTES))
        rates["fetch"].append(await _fetch_rate(worker, wanted))
    await worker.close()
    await serving
    best = {name: max(values) / 1e9 for name, values in rates.items()}
    return [
        _against(
            f"DRAM get through the Link, frames of {GET_FRAME_BYTES / MIB:.2g} MiB",
            best["get"],
            best["get link"],
        ),
        _against("the same, verified by the worker", best["fetch"], best["get link"]),
        Figure("DRAM get: share of the Link", _share(rates, "get"), "", at_least=0.7),
        _against(
            f"put from a worker, frames of {PUT_FRAME_BYTES / MIB:.2g} MiB", best["put"], best["put link"]
        ),
        Figure("put: share of the Link", _share(rates, "put"), "", at_least=0.5),
    ]


def _share(rates: Mapping[str, list[float]], name: str) -> float:
    return statistics.median(own / link for own, link in zip(rates[name], rates[f"{name} link"], strict=True))


def _against(name: str, gigabytes_per_second: float, link_gigabytes_per_second: float) -> Figure:
    return Figure(name, gigabytes_per_second, "GB/s", link_gigabytes_per_second, "the Link")


async def _put_round(worker: StoreLink, blocks: torch.Tensor) -> tuple[float, list[bytes]]:
    """Bytes per second until the store holds them all, and their names."""
    names = [os.urandom(NAME_BYTES) for _ in range(PUT_BLOCKS * PUTS_PER_ROUND)]
    begun = time.perf_counter()
    for first in range(0, len(names), PUT_BLOCKS):
        part = UploadPart(
            names=names[first : first + PUT_BLOCKS],
            parent=names[first - 1] if first else b"",
            take_layers=lambda layers: blocks[: len(layers) * PUT_BLOCKS],
        )
        await worker.put(part)
    # A Link keeps its order: this is answered once all the puts are in.
    await _fetch_rate(worker, names[-1:])
    return len(names) * NUM_LAYERS * SHAPE.num_bytes / (time.perf_counter() - begun), names


async def _fetch_rate(worker: StoreLink, names: Sequence[bytes]) -> float:
    async def write(_layer: int, _first: int, _blocks: torch.Tensor) -> bool:
        return True

    begun = time.perf_counter()
    result, _ = await worker.fetch(names, [range(len(names))], write, timeout_seconds=DEADLINE_SECONDS)
    if result is not FetchResult.HIT:
        raise RuntimeError(f"what was put could not be fetched: {result.value}")
    return len(names) * NUM_LAYERS * SHAPE.num_bytes / (time.perf_counter() - begun)


async def _get_rate(link: Link, names: Sequence[bytes]) -> float:
    """What the store and the Link do; nothing is made of what comes."""
    begun, num_layers = time.perf_counter(), 0
    body = np.frombuffer(b"".join(names), dtype=np.uint8)
    header = encode_header(Fetch(fetch_id=1, num_blocks=len(names)))
    await link.send(header, body, timeout_seconds=DEADLINE_SECONDS)
    while num_layers < NUM_LAYERS:
        frame = await link.receive(timeout_seconds=DEADLINE_SECONDS)
        fetched = decode_header(frame.header)
        frame.release()
        if not isinstance(fetched, Fetched):
            raise RuntimeError("what was put could not be fetched")
        num_layers += fetched.num_layers
    return len(names) * NUM_LAYERS * SHAPE.num_bytes / (time.perf_counter() - begun)


async def _bare_rate(link: Link, frame_bytes: int) -> float:
    """As many layers, sent to nobody who looks at them."""
    bodies: list[Bytes] = [np.ones(frame_bytes, dtype=np.uint8) for _ in range(NUM_IN_FLIGHT)]
    num_frames = max(NUM_LAYERS, PUT_BLOCKS * PUTS_PER_ROUND * NUM_LAYERS * SHAPE.num_bytes // frame_bytes)
    left = list(range(num_frames))

    async def send_some(body: Bytes) -> None:
        while left:
            left.pop()
            await link.send(SINK, body, timeout_seconds=DEADLINE_SECONDS)

    begun = time.perf_counter()
    await asyncio.gather(*(send_some(body) for body in bodies))
    await link.send(TELL, timeout_seconds=DEADLINE_SECONDS)
    (await link.receive(timeout_seconds=DEADLINE_SECONDS)).release()
    return num_frames * frame_bytes / (time.perf_counter() - begun)


@asynccontextmanager
async def _store(nats_server: str) -> AsyncGenerator[str]:
    """A store process; its Links' address."""
    environment = os.environ | {"KVMESH_LINK_SECRET": SECRET.decode(), "NATS_SERVER": nats_server}
    flags = ("--name", "bench-store", "--memory-gib", "0.5", "--disk-gib", "0", "--log-level", "error")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kv_store", *flags, env=environment
    )
    bus = await NatsBus.connect(nats_server)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield await _ready_address(bus)
    finally:
        await bus.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ready_address(bus: NatsBus) -> str:
    async with bus.watch_presence() as entries:
        async for entry in entries:
            if entry.value is not None:
                presence = msgspec.msgpack.decode(entry.value, type=Presence)
                if presence.kind is ServiceKind.KV_STORE and presence.state is ServiceState.READY:
                    return presence.link_address
    raise RuntimeError("the bus closed before the store was there")


def measure_index() -> list[Figure]:
    """Memory of the names of millions of blocks, and how long a prefix of 1000 takes among them."""
    names = os.urandom(NAME_BYTES * NUM_NAMES)
    before = _resident_bytes()
    tree = BlockTree(NUM_NAMES * 2)
    parent = b""
    for at in range(0, len(names), NAME_BYTES):
        name = names[at : at + NAME_BYTES]
        tree.add(name, parent if at % (CHAIN_BLOCKS * NAME_BYTES) else b"", MEMORY, 0.0)
        parent = name
    gib = (_resident_bytes() - before) / (1 << 30)
    rounds = [
        np.percentile([_lookup_seconds(tree, names, chain) for chain in _chains(seed)], (50, 99)) * 1e3
        for seed in range(ROUNDS)
    ]
    p50, p99 = min(rounds, key=lambda percentiles: float(percentiles[1]))
    millions = f"{NUM_NAMES / 1e6:g} million"
    return [
        Figure(f"names of {millions} blocks", gib, "GiB", at_most=2.0),
        Figure(f"prefix of {CHAIN_BLOCKS} blocks among {millions}, p50", float(p50), "ms"),
        Figure(f"prefix of {CHAIN_BLOCKS} blocks among {millions}, p99", float(p99), "ms", at_most=1.0),
    ]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _chains(seed: int) -> list[int]:
    return [int(c) for c in np.random.default_rng(seed).integers(0, NUM_NAMES // CHAIN_BLOCKS, NUM_LOOKUPS)]


def _lookup_seconds(tree: BlockTree, names: bytes, chain: int) -> float:
    start = chain * CHAIN_BLOCKS * NAME_BYTES
    wanted = [
        names[at : at + NAME_BYTES] for at in range(start, start + CHAIN_BLOCKS * NAME_BYTES, NAME_BYTES)
    ]
    begun = time.perf_counter()
    nodes = tree.longest_prefix(wanted)
    tree.touch(nodes, 1.0)
    tree.lease(nodes, 2.0)
    return time.perf_counter() - begun
