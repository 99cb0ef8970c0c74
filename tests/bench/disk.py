"""The disk tier against a plain file of the same bytes, and against RocksDB holding the values itself,
measured in a process of their own: `python -m tests.bench.disk FOLDER` prints JSON.

The same 64 MiB three times in one folder: as one plain file, as blocks of the tier, and as blocks that are
RocksDB's own values. Rounds take turns, and every rate is the median of its rounds.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from rocksdict import Rdict

from libs.kv.checksum import block_checksums
from libs.kv.runs import RUN_BLOCKS
from services.kv_store.disk.blocks import BlockToRead, BlockToWrite
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.disk.index import index_options
from services.kv_store.disk.settings import DiskSettings
from tests.bench.figures import Figure, Say

NUM_LAYERS, LAYER_BYTES = 30, 12 << 10
NUM_BLOCKS = -(-(64 << 20) // (NUM_LAYERS * LAYER_BYTES))
CHUNK_BYTES = 1 << 20
ROUNDS = 15
LAG_SECONDS = 0.001
SHARE_OF_PLAIN = 0.6
SETTINGS = DiskSettings(cap_bytes=512 << 20, fsync="off")

Work = Callable[[], Awaitable[None]]


def measure_disk(say: Say) -> list[Figure]:
    """64 MiB of blocks, 30 layers of 12 KiB, verified on reading; in a process of the store's own."""
    folder = Path(tempfile.gettempdir()).resolve()
    say(f"64 MiB of blocks, cold and warm, on {_storage(folder)}")
    command = [sys.executable, "-m", "tests.bench.disk", str(folder)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    measured: dict[str, float] = json.loads(run.stdout)
    figures = [_read(measured, "tier read", cache, folder) for cache in ("warm", "cold")]
    for cache in ("warm", "cold"):
        figures += [_rate(measured, f"{what}, {cache}") for what in ("tier read by layer", "rocksdb get")]
    figures += [_rate(measured, what) for what in ("tier write", "rocksdb put")]
    stalls = ("tier read, warm", "rocksdb get, warm", "tier write", "rocksdb put")
    return figures + [
        Figure(f"{what}: longest stall of the event loop", measured[f"{what}, stall"] * 1e3, "ms")
        for what in stalls
    ]


def _read(measured: dict[str, float], what: str, cache: str, folder: Path) -> Figure:
    plain = measured[f"plain read, {cache}"] / 1e9
    return Figure(
        f"{what}, {cache} page cache, {_storage(folder)}",
        measured[f"{what}, {cache}"] / 1e9,
        "GB/s",
        plain,
        "plain read",
        at_least=SHARE_OF_PLAIN * plain,
    )


def _rate(measured: dict[str, float], what: str) -> Figure:
    _, _, cache = what.partition(", ")
    plain = f"plain read, {cache}" if cache else "plain write"
    return Figure(what, measured[what] / 1e9, "GB/s", measured[plain] / 1e9, plain.partition(",")[0])


def _storage(folder: Path) -> str:
    """File system and device that hold the folder. In memory a cold cache is a warm one."""
    mounts = [line.split()[:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    device, _, kind = max((m for m in mounts if folder.is_relative_to(m[1])), key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


@dataclass(frozen=True)
class Scene:
    """Blocks in memory, [num_layers, num_blocks, layer_bytes], and where each kind of copy lies."""

    folder: Path
    slab: NDArray[np.uint8]
    names: list[bytes]
    into: NDArray[np.uint8]
    tier: DiskTier
    rocks: Rdict


async def measure(folder: Path) -> dict[str, float]:
    """Bytes per second by "what, cache", and the event loop's longest stall in seconds by "what, stall"."""
    slab = np.random.default_rng(7).integers(0, 256, (NUM_LAYERS, NUM_BLOCKS, LAYER_BYTES), dtype=np.uint8)
    names = [os.urandom(16) for _ in range(NUM_BLOCKS)]
    tier = DiskTier(folder / "tier", SETTINGS)
    await tier.open()
    rocks = Rdict(str(folder / "rocks"), index_options(SETTINGS))
    scene = Scene(folder, slab, names, np.zeros_like(slab), tier, rocks)
    try:
        rates = await _write_all(scene)
        reads = _reads(scene)
        for cache in ("warm", "cold"):
            rates |= await _rates(scene, reads, cache)
        return rates
    finally:
        rocks.close()
        await tier.close()


async def _write_all(scene: Scene) -> dict[str, float]:
    def write_plain() -> None:
        with (scene.folder / "plain").open("wb", buffering=0) as file:
            for block in range(NUM_BLOCKS):
                file.write(scene.slab[:, block].tobytes())

    async def plain() -> None:
        await asyncio.to_thread(write_plain)

    blocks = [_block(scene, index) for index in range(NUM_BLOCKS)]

    async def tier() -> None:
        for start in range(0, NUM_BLOCKS, RUN_BLOCKS):
            if not all(await scene.tier.write(blocks[start : start + RUN_BLOCKS])):
                raise RuntimeError("the bench's blocks do not fit under its own cap")

    def put_all() -> None:
        for index, name in enumerate(scene.names):
            scene.rocks[name] = scene.slab[:, index].tobytes()
        scene.rocks.flush()

    async def rocks() -> None:
        await asyncio.to_thread(put_all)

    rates: dict[str, float] = {}
    for what, work in {"plain write": plain, "tier write": tier, "rocksdb put": rocks}.items():
        seconds, stall = await _timed(work)
        rates |= {what: scene.slab.nbytes / seconds, f"{what}, stall": stall}
    return rates


def _block(scene: Scene, index: int) -> BlockToWrite:
    parent = scene.names[index - 1] if index else b""
    checksums = block_checksums(scene.slab[:, index].reshape(-1), NUM_LAYERS)
    return BlockToWrite(scene.names[index], parent, list(scene.slab[:, index]), checksums)


def _reads(scene: Scene) -> dict[str, Work]:
    whole = [BlockToRead(name, list(scene.into[:, i])) for i, name in enumerate(scene.names)]
    by_layer = [
        [BlockToRead(name, [scene.into[layer, i]]) for i, name in enumerate(scene.names)]
        for layer in range(NUM_LAYERS)
    ]

    def read_plain() -> None:
        flat = scene.into.reshape(-1)
        with (scene.folder / "plain").open("rb", buffering=0) as file:
            for start in range(0, flat.size, CHUNK_BYTES):
                os.readv(file.fileno(), [cast("bytearray", flat[start : start + CHUNK_BYTES])])

    def get_all() -> None:
        for index, name in enumerate(scene.names):
            value = np.frombuffer(cast("bytes", scene.rocks[name]), np.uint8)
            scene.into[:, index] = value.reshape(NUM_LAYERS, LAYER_BYTES)

    async def plain() -> None:
        await asyncio.to_thread(read_plain)

    async def tier() -> None:
        _require(await scene.tier.read(whole, range(NUM_LAYERS)))

    async def layers() -> None:
        for layer, wanted in enumerate(by_layer):
            _require(await scene.tier.read(wanted, range(layer, layer + 1)))

    async def rocks() -> None:
        await asyncio.to_thread(get_all)

    return {"plain read": plain, "tier read": tier, "tier read by layer": layers, "rocksdb get": rocks}


def _require(held: list[bool]) -> None:
    if not all(held):
        raise RuntimeError(f"{held.count(False)} blocks of the bench were not read back")


async def _rates(scene: Scene, reads: Mapping[str, Work], cache: str) -> dict[str, float]:
    seconds: dict[str, list[float]] = {what: [] for what in reads}
    stalls: dict[str, list[float]] = {what: [] for what in reads}
    for _ in range(ROUNDS):
        for what, work in reads.items():
            if cache == "cold":
                _drop_page_cache(scene.folder)
            took, stall = await _timed(work)
            seconds[what].append(took)
            stalls[what].append(stall)
    rates = {f"{what}, {cache}": scene.slab.nbytes / statistics.median(seconds[what]) for what in reads}
    return rates | {f"{what}, {cache}, stall": statistics.median(stalls[what]) for what in reads}


def _drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


async def _timed(work: Work) -> tuple[float, float]:
    """Seconds it took, and by how much the event loop's worst wake-up was late meanwhile."""
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            due = time.perf_counter() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            worst = max(worst, time.perf_counter() - due)

    watching = asyncio.ensure_future(watch())
    await asyncio.sleep(0)
    start = time.perf_counter()
    await work()
    seconds = time.perf_counter() - start
    watching.cancel()
    await asyncio.wait([watching])
    return seconds, worst


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kvmesh-disk-", dir=sys.argv[1]) as made:
        print(json.dumps(asyncio.run(measure(Path(made)))))
