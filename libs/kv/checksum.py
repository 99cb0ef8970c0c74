"""The checksums that travel with KV: xxh3-64, against corruption and mix-ups, not attackers."""

from typing import cast

import numpy as np
import xxhash
from numpy.typing import NDArray


def checksum(body: NDArray[np.uint8]) -> int:
    """xxh3-64 of contiguous bytes. Raises ValueError for an array with gaps."""
    if not body.flags.c_contiguous:
        raise ValueError(
            f"a checksum needs contiguous bytes, got strides {body.strides} for shape {body.shape}"
        )
    # The buffer protocol avoids a copy; xxhash's stub names only bytes-like types.
    return xxhash.xxh3_64_intdigest(cast("bytes", body.data))


def block_checksums(body: NDArray[np.uint8], num_blocks: int) -> NDArray[np.uint64]:
    """xxh3-64 of each of the `num_blocks` equal parts of `body`. Raises ValueError for unequal parts."""
    if num_blocks < 1 or body.size % num_blocks:
        raise ValueError(f"{body.size} bytes are not {num_blocks} equal blocks")
    part_bytes = body.size // num_blocks
    # Slices of a memoryview cost a fraction of those of an array, and blocks may be many and small.
    parts = np.ascontiguousarray(body).reshape(-1).data
    starts = range(0, body.size, part_bytes) if part_bytes else (0,) * num_blocks
    digest = xxhash.xxh3_64_intdigest
    checksums = [digest(cast("bytes", parts[at : at + part_bytes])) for at in starts]
    return np.array(checksums, dtype=np.uint64)


def checksum_of_blocks(checksums: NDArray[np.uint64]) -> int:
    """One number that proves all the blocks: xxh3-64 over their little-endian checksums."""
    return checksum(checksums.astype("<u8").view(np.uint8))
