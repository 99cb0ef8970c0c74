"""The tier in memory: what is held, and the bytes of it. Synchronous; the service does the talking."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from libs.kv.block_index import BlockIndex
from libs.kv.checksum import block_checksums, checksum_of_blocks
from services.kv_store.arena import Arena, Shape


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

    def put_layers(self, put: Put, layers: range, body: NDArray[np.uint8], checksum: int) -> bool:
        """Take layers of all blocks of a put; True when they were the last, and the blocks are held now.

        Raises PutRefused; the caller then drops the put.
        """
        expected_bytes = len(layers) * len(put.names) * put.layer_bytes
        is_due = bool(layers) and layers.start >= 0 and layers.stop <= put.num_layers
        if not is_due or not put.arrived.isdisjoint(layers) or body.size != expected_bytes:
            raise PutRefused(f"{layers} with {body.size} bytes, expected {expected_bytes}, each layer once")
        checksums = block_checksums(body, len(layers) * len(put.names))
        if checksum_of_blocks(checksums) != checksum:
            raise LayerCorrupt(f"{layers} of {len(put.names)} blocks arrived with another checksum")
        fresh = set(put.fresh)
        shape = (len(layers), len(put.names))
        blocks, checksums = body.reshape(*shape, put.layer_bytes), checksums.reshape(shape)
        for row, layer in enumerate(layers):
            for column, name in enumerate(put.names):
                if name in fresh:
                    self.arena.write_layer(name, layer, blocks[row, column], checksums[row, column])
        put.arrived.update(layers)
        if len(put.arrived) < put.num_layers:
            return False
        self.index.commit(put.fresh)
        return True

    def drop_put(self, put: Put) -> None:
        """This put will not be completed; what arrived of it is forgotten."""
        self.index.discard(put.fresh)
        self.arena.free(put.fresh)

    def begin_fetch(self, names: Sequence[bytes]) -> Shape | None:
        """Keep these blocks until `end_fetch` and tell their shape; None: some are missing."""
        if not names or not self.index.begin_reading(names):
            return None
        shape = self.arena.shape_of(names)
        if shape is None:
            self.index.end_reading(names)
            return None
        return shape

    def end_fetch(self, names: Sequence[bytes]) -> None:
        """The inverse of `begin_fetch`."""
        self.index.end_reading(names)
