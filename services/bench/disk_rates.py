"""The disk tier against a plain read of the same bytes, and against RocksDB holding the values itself."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from services.bench.figures import Figure

BENCH = "services.kv_store.disk.bench"
SHARE_OF_PLAIN = 0.6


def measure_disk(say: Callable[[str], None]) -> list[Figure]:
    """64 MiB of blocks, 30 layers of 12 KiB, verified on reading; in a process of the store's own."""
    folder = Path(tempfile.gettempdir()).resolve()
    say(f"64 MiB of blocks, cold and warm, on {_storage(folder)}")
    run = subprocess.run(
        [sys.executable, "-m", BENCH, str(folder)], check=True, capture_output=True, text=True, timeout=300
    )
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
