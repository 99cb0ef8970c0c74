"""Names of KV blocks: what a block's content depends on, hashed.

A name chains over everything before the block, so equal names mean equal KV: same model, precision and layout
(the fingerprint), same tenant (the salt), same tokens from position 0 on. Only full blocks have names.
"""

from collections.abc import Sequence

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

NAME_BYTES = 16


def root_name(fingerprint: str, cache_salt: str, block_size: int) -> bytes:
    """The parent of every first block. Fields carry their lengths, so no two triples hash the same bytes."""
    hasher = blake3()
    for field in (fingerprint.encode(), cache_salt.encode()):
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    hasher.update(block_size.to_bytes(8, "little"))
    return hasher.digest(NAME_BYTES)


def next_name(parent: bytes, block: bytes) -> bytes:
    """Name of the block after `parent` whose token ids are `block`, little-endian int32."""
    return blake3(parent + block).digest(NAME_BYTES)


def block_names(
    token_ids: Sequence[int] | NDArray[np.integer], block_size: int, fingerprint: str, cache_salt: str
) -> list[bytes]:
    """Names of the full blocks of `token_ids`, first block first; 16 bytes each."""
    packed = np.asarray(token_ids, dtype="<i4").tobytes()
    stride_bytes = 4 * block_size
    name = root_name(fingerprint, cache_salt, block_size)
    names: list[bytes] = []
    for start in range(0, len(packed) // stride_bytes * stride_bytes, stride_bytes):
        name = next_name(name, packed[start : start + stride_bytes])
        names.append(name)
    return names


def split_names(joined: bytes) -> list[bytes]:
    """Names from their concatenation, as messages carry them. Raises ValueError where it is not whole."""
    if len(joined) % NAME_BYTES:
        raise ValueError(f"block names take {NAME_BYTES} bytes each, got {len(joined)} bytes in all")
    return [joined[start : start + NAME_BYTES] for start in range(0, len(joined), NAME_BYTES)]
