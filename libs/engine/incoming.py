"""KV that is written into a sequence from outside."""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from libs.engine.errors import BadBlocks
from libs.engine.ledger import Ledger
from libs.engine.loading import LoadingSteps
from libs.engine.pool import BlockLayout
from libs.engine.sequence import SequenceState
from libs.engine.whole_kv import WholeKv


class Incoming:
    """Writes go where the KV of their layer lies; `wrote` hears of the blocks."""

    def __init__(
        self,
        ledger: Ledger,
        loading: LoadingSteps,
        kv: WholeKv,
        whole: BlockLayout,
        wrote: Callable[[Iterable[int]], None],
    ) -> None:
        self._ledger, self._loading, self._kv, self._wrote = ledger, loading, kv, wrote
        self._num_layers, self._num_heads = kv.placement.num_layers, kv.placement.num_kv_heads
        self._shape = (self._num_heads, 2, whole.block_size, whole.head_dim)
        self._dtype = whole.dtype

    def write(self, sequence_id: str, layer: int, first_block: int, blocks: torch.Tensor) -> bool:
        """KV of one layer into reserved blocks; False where the sequence does not await KV (any more).

        Blocks found by name are skipped: others read them. Raises BadBlocks for a wrong shape or place.
        """
        sequence = self._ledger.sequences.get(sequence_id)
        if sequence is None or (sequence.is_begun and not sequence.is_loading):
            return False
        self._check(layer, blocks)
        end = first_block + len(blocks)
        arrivals = self._ledger.arrivals(sequence)
        if first_block < 0 or end > arrivals.end_block:
            raise BadBlocks(
                f"blocks {first_block} to {end} of {sequence_id!r}, which takes {arrivals.end_block} blocks"
            )
        if sequence.state is SequenceState.RESERVED:
            sequence.go(SequenceState.LOADING)
        start = max(first_block, sequence.num_found_blocks)
        if start < end and not (sequence.is_begun and arrivals.has(layer, start, end)):
            ids = np.array(sequence.blocks[start:end], dtype=np.int64)
            with torch.inference_mode():
                self._kv.write(layer, ids, blocks[start - first_block :])
            self._wrote(sequence.blocks[start:end])
            arrivals.add(layer, start, end)
        if sequence.is_loading and arrivals.are_complete and not self._loading.has_begun(sequence):
            self._ledger.loaded(sequence)
        return True

    def _check(self, layer: int, blocks: torch.Tensor) -> None:
        if not 0 <= layer < self._num_layers:
            raise BadBlocks(f"layer {layer} of {self._num_layers} does not exist")
        if blocks.shape[1:] != self._shape or blocks.dtype != self._dtype:
            raise BadBlocks(
                f"blocks of shape {tuple(blocks.shape)} and {blocks.dtype}; this pool's are "
                f"{(len(blocks), *self._shape)} and {self._dtype}"
            )
