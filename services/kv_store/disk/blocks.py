"""Blocks as they come and go: those that callers hand over and ask for, and those that a restart finds."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Shape = tuple[int, int]
"""Layers, and bytes of one block in one layer."""


class DiskBlock(NamedTuple):
    """A block that lies on disk. `parent` is b"" at the start of a chain."""

    name: bytes
    parent: bytes
    num_layers: int
    layer_bytes: int
    written_at_unix: float
    num_hits: int


@dataclass(frozen=True, slots=True)
class BlockToWrite:
    """One block and where its bytes are: `layers` holds one uint8[layer_bytes] per layer, `checksums` is
    uint64[num_layers], xxh3-64 each. The caller leaves the bytes alone until the write is over."""

    name: bytes
    parent: bytes
    layers: Sequence[NDArray[np.uint8]]
    checksums: NDArray[np.uint64]
    num_hits: int = 0

    @property
    def shape(self) -> Shape:
        """Layers, and bytes of one layer."""
        return len(self.layers), self.layers[0].size


@dataclass(frozen=True, slots=True)
class BlockToRead:
    """One block and where its bytes shall go: `into` holds one writable, contiguous uint8[layer_bytes] per
    layer asked for. `checksums`, where given, is uint64[number of those layers] and is filled in as well."""

    name: bytes
    into: Sequence[NDArray[np.uint8]]
    checksums: NDArray[np.uint64] | None = None


class ReadResult(StrEnum):
    """How reading one block ended."""

    READ = "read"
    MISSING = "missing"
    """Not in the index, or its file is gone or too short."""
    CORRUPT = "corrupt"
    """Its bytes do not match their checksums."""
    FAILED = "failed"
    """The device or the system refused."""
