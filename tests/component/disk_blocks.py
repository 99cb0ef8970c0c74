"""Blocks for tests of the disk tier: a name gives the bytes, so any read can be checked."""

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from libs.kv.checksum import block_checksums
from services.kv_store.disk.blocks import BlockToRead, BlockToWrite, DiskBlock, Shape
from services.kv_store.disk.disk_tier import DiskTier
from services.kv_store.disk.settings import DiskSettings

SHAPE: Shape = (6, 4096)
CAP_BYTES = 32 << 20
SETTINGS = DiskSettings(cap_bytes=CAP_BYTES, fsync="off")


def name_of(number: int) -> bytes:
    """16 bytes, evenly spread as hashes are."""
    return np.random.default_rng(number).bytes(16)


def body_of(name: bytes, shape: Shape = SHAPE) -> NDArray[np.uint8]:
    """The bytes of a block, uint8[num_layers, layer_bytes]."""
    seed = int.from_bytes(name, "big")
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def block(name: bytes, parent: bytes = b"", shape: Shape = SHAPE) -> BlockToWrite:
    body = body_of(name, shape)
    return BlockToWrite(name, parent, list(body), block_checksums(body, shape[0]))


def chain(first: int, num_blocks: int, shape: Shape = SHAPE) -> list[BlockToWrite]:
    names = [name_of(first + i) for i in range(num_blocks)]
    return [block(name, parent, shape) for name, parent in zip(names, [b"", *names], strict=False)]


@dataclass(frozen=True)
class Answer:
    """What reading gave: `right` were read and are right, `missed` were not; nothing else is allowed."""

    right: list[bytes]
    missed: list[bytes]


async def read(tier: DiskTier, names: Iterable[bytes], shape: Shape = SHAPE) -> Answer:
    names = list(names)
    bodies = [np.zeros(shape, np.uint8) for _ in names]
    wanted = [BlockToRead(name, list(body)) for name, body in zip(names, bodies, strict=True)]
    held = await tier.read(wanted, range(shape[0]))
    for name, body, is_held in zip(names, bodies, held, strict=True):
        assert not is_held or np.array_equal(body, body_of(name, shape)), f"wrong bytes for {name.hex()}"
    return Answer(
        [name for name, is_held in zip(names, held, strict=True) if is_held],
        [name for name, is_held in zip(names, held, strict=True) if not is_held],
    )


@asynccontextmanager
async def opened(
    folder: Path, settings: DiskSettings = SETTINGS
) -> AsyncIterator[tuple[DiskTier, list[DiskBlock]]]:
    tier = DiskTier(folder, settings)
    try:
        yield tier, await tier.open()
    finally:
        await tier.close()


async def fill(folder: Path, blocks: Sequence[BlockToWrite], settings: DiskSettings = SETTINGS) -> None:
    """Written, and the tier closed again."""
    async with opened(folder, settings) as (tier, _):
        assert all(await tier.write(blocks))


def names_of(blocks: Iterable[BlockToWrite | DiskBlock]) -> list[bytes]:
    return [block.name for block in blocks]


def disk_usage_bytes(folder: Path) -> int:
    """As du counts. RocksDB may be removing files meanwhile."""
    num_bytes = 0
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(Path(where) / name).st_blocks * 512
    return num_bytes
