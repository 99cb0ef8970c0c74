"""A worker whose modules run here, as its host sees it, and their KV."""

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import PagedAttention
from libs.engine.hosting.calls import HostedCall
from libs.engine.hosting.hosted_step import BadCall, HostedStep, tensor_of
from libs.engine.hosting.port import Answer, HostLost
from libs.engine.hosting.split_context import ContextPart
from libs.engine.memory.arena import Region
from libs.engine.memory.pool import BlockLayout, layer_spans, shaped
from libs.model.model import Model
from libs.placement.module import Module, ModuleKind


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
        it is in use its owner may have more blocks. Raises BadCall for new ids that there are not."""
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


@dataclass(eq=False)
class HostedModule:
    """One module and what it takes here."""

    move_id: str
    module: Module
    kv: HostedKv
    region: Region
    attention: PagedAttention
    model: Model | None
    """With the weights of the module's layers and no others; None where no weights are needed."""
    uses_own_weights: bool
    context: tuple[HostedStep, int, ContextPart] | None = None
    """Of remote blocks: the step and first block that it was split for last, and their part of it."""


@dataclass(eq=False)
class Owner:
    """One owner, its modules here, and the answers that it waits for."""

    name: str
    modules: dict[str, HostedModule] = field(default_factory=dict[str, HostedModule])
    calls: deque[tuple[HostedCall, Answer]] = field(default_factory=deque[tuple[HostedCall, Answer]])
    step: HostedStep | None = None
    under_way: Generator[None] | None = None
    awaited: Answer | None = None
    """Of the call under way."""
    busy_with: HostedModule | None = None
    """What the call under way uses over its pauses."""
    error: HostLost | None = None
    """Broke a call; every later call fails with it."""
    overrun: HostLost | None = None
    """Calls were lost, told by the thread that lost them: breaks it before the next call."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to run."""
        return self.under_way is not None or bool(self.calls)

    def any_module(self, move_id: str) -> HostedModule:
        """Raises BadCall."""
        if move_id not in self.modules:
            raise BadCall(f"no module that move {move_id!r} brought is here")
        return self.modules[move_id]

    def module(self, move_id: str, kind: ModuleKind) -> HostedModule:
        """Raises BadCall."""
        found = self.any_module(move_id)
        if found.module.kind is not kind:
            raise BadCall(f"the module of {move_id!r} is one of {found.module.kind.value}, not {kind.value}")
        return found
