"""The tier in memory: what is held, and the bytes of it. Synchronous; the service does the talking."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libs.kv.block_index import BlockIndex
from libs.kv.checksum import block_checksums, checksum_of_blocks
from services.kv_store.arena import Arena


class PutRefused(Exception):
    """This put cannot be taken: no room beside what is pinned, or its layers are not what it announced."""


class LayerCorrupt(PutRefused):
    """A layer's bytes do not match its checksum."""


@dataclass(slots=True)
class Put:
    """Blocks on their way in. `fresh` are those not held before; the bytes of the others are not kept."""

    names: tuple[bytes, ...]
    fresh: tuple[bytes, ...]
    num_layers: int
    layer_bytes: int
    arrived: set[int] = field(default_factory=set[int])


class DramTier:
    """Blocks in memory under one budget. `now` is monotonic seconds."""

    def __init__(self, budget_bytes: int) -> None:
        self.index = BlockIndex(budget_bytes)
        self.arena = Arena(budget_bytes)
        self.num_evicted = 0

    def find(self, names: Sequence[bytes], now: float, lease_seconds: float) -> int:
        """Length of the held prefix, which is kept for `lease_seconds`."""
        held = self.index.longest_prefix(names)
        self.index.use(names[:held], pinned_until=now + lease_seconds)
        return held

    def begin_put(self, names: Sequence[bytes], num_layers: int, layer_bytes: int, now: float) -> Put:
        """Make room. Raises PutRefused, and then holds nothing for it."""
        if num_layers < 1 or layer_bytes < 1 or not names:
            raise PutRefused(f"{len(names)} blocks of {num_layers} layers of {layer_bytes} bytes")
        staging = self.index.stage(names, num_layers * layer_bytes, now)
        if staging is None:
            raise PutRefused(f"no room for {len(names)} blocks of {num_layers * layer_bytes} bytes")
        self.num_evicted += len(staging.evicted)
        self.arena.free(staging.evicted)
        self.arena.allocate(staging.names, (num_layers, layer_bytes))
        return Put(tuple(names), staging.names, num_layers, layer_bytes)

    def put_layer(self, put: Put, layer: int, body: NDArray[np.uint8], checksum: int) -> bool:
        """Take one layer of all blocks of a put; True when it was the last one, and the blocks are held now.

        Raises PutRefused; the caller then drops the put.
        """
        expected_bytes = len(put.names) * put.layer_bytes
        if layer not in range(put.num_layers) or layer in put.arrived or body.size != expected_bytes:
            raise PutRefused(
                f"layer {layer} with {body.size} bytes, expected {expected_bytes} once per layer"
            )
        checksums = block_checksums(body, len(put.names))
        if checksum_of_blocks(checksums) != checksum:
            raise LayerCorrupt(f"layer {layer} of {len(put.names)} blocks arrived with another checksum")
        fresh = set(put.fresh)
        blocks = body.reshape(len(put.names), put.layer_bytes)
        for name, block, block_checksum in zip(put.names, blocks, checksums, strict=True):
            if name in fresh:
                self.arena.write_layer(name, layer, block, block_checksum)
        put.arrived.add(layer)
        if len(put.arrived) < put.num_layers:
            return False
        self.index.commit(put.fresh)
        return True

    def drop_put(self, put: Put) -> None:
        """This put will not be completed; what arrived of it is forgotten."""
        self.index.discard(put.fresh)
        self.arena.free(put.fresh)

    def begin_fetch(self, names: Sequence[bytes]) -> int | None:
        """Keep these blocks until `end_fetch` and tell their number of layers; None: some are missing."""
        if not names or not self.index.begin_reading(names):
            return None
        shape = self.arena.shape_of(names)
        if shape is None:
            self.index.end_reading(names)
            return None
        return shape[0]

    def end_fetch(self, names: Sequence[bytes]) -> None:
        """The inverse of `begin_fetch`."""
        self.index.end_reading(names)
