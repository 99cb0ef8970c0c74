"""The checksum that travels with every KV body: xxh3-64, against corruption and mix-ups, not attackers."""

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
