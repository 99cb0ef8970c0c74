"""The KV of one hosted module: as many blocks as its home has, under the home's ids."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from libs.engine.hosting.hosted_step import BadCall, tensor_of
from libs.engine.pool import BlockLayout, layer_spans, shaped


class HostedKv:
    """Blocks in memory that the host gave up. Ids are checked: they come from elsewhere."""

    def __init__(self, layout: BlockLayout, num_blocks: int, memory: torch.Tensor) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._blocks = shaped(memory, layout, num_blocks)
        self._spans = layer_spans(layout)

    def layer(self, layer: int) -> torch.Tensor:
        """KV of one layer, `[num_blocks, heads, 2, block_size, head_dim]`, a view. Raises BadCall."""
        if layer not in self._spans:
            raise BadCall(f"layer {layer} is none of the module's {sorted(self._spans)}")
        first, end = self._spans[layer]
        return self._blocks[:, first:end]

    def write(self, layer: int | None, blocks: NDArray[np.int64], kv: torch.Tensor) -> None:
        """Raises BadCall for other shapes, dtypes or ids than there are."""
        target, ids = self._part(layer), self._ids(blocks)
        if kv.dtype != target.dtype or kv.shape != (len(ids), *target.shape[1:]):
            raise BadCall(
                f"KV of {kv.dtype} {list(kv.shape)} for {len(ids)} blocks of {target.dtype} "
                f"{list(target.shape[1:])}"
            )
        target[ids] = kv.to(target.device)

    def read(self, layer: int | None, blocks: NDArray[np.int64]) -> torch.Tensor:
        """A copy. Raises BadCall for ids that there are not."""
        return self._part(layer).index_select(0, self._ids(blocks))

    def move(self, moved: Mapping[int, int]) -> None:
        """Content follows its block to another id. Ids that the module does not have hold nothing here: until
        it is in use its home may have more blocks. Raises BadCall for new ids that there are not."""
        moved = {old: new for old, new in moved.items() if old < self.num_blocks}
        sources = self._ids(np.fromiter(moved.keys(), np.int64, len(moved)))
        targets = self._ids(np.fromiter(moved.values(), np.int64, len(moved)))
        if len(set(moved.values())) < len(moved):
            raise BadCall("two blocks cannot get one id")
        self._blocks[targets] = self._blocks.index_select(0, sources)

    def _part(self, layer: int | None) -> torch.Tensor:
        return self._blocks if layer is None else self.layer(layer)

    def _ids(self, blocks: NDArray[np.int64]) -> torch.Tensor:
        if blocks.dtype != np.int64 or blocks.ndim != 1:
            raise BadCall(f"block ids are int64 [n], not {blocks.dtype} {list(blocks.shape)}")
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_blocks):
            raise BadCall(
                f"block ids {blocks.min()} to {blocks.max()}; the module has {self.num_blocks} blocks"
            )
        return tensor_of(blocks, self._blocks.device)
