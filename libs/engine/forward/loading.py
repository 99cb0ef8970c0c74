"""KV of a begun sequence that is still on its way in, and the step that follows it layer by layer.

A step that has run out of whole layers does not wait: it is put aside, others run, and it goes on where it
stopped once its next layer is whole. So nothing can hang on writes that never come.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np
import torch

from libs.engine.errors import BadBlocks
from libs.engine.forward.ragged import RaggedBatch, ragged_batch
from libs.engine.forward.remote_kv import WholeKv
from libs.engine.forward.runner import Layerwise, Runner, leaving
from libs.engine.memory.pool import BlockLayout
from libs.engine.scheduling.scheduler import Chunk, Limits, loading_chunk
from libs.engine.scheduling.sequence import Arrivals, Sequence, SequenceState, Span
from libs.engine.scheduling.sequence_table import SequenceTable


class LoadingStep:
    """A step of one sequence alone, run as far as its KV has come."""

    def __init__(
        self,
        chunk: Chunk[Sequence],
        span: Span,
        batch: RaggedBatch | None,
        layers: Layerwise,
        arrivals: Arrivals,
    ) -> None:
        self.chunk, self.span, self.batch = chunk, span, batch
        self.logits: torch.Tensor | None = None
        self.busy_seconds = 0.0
        self._layers, self._arrivals = layers, arrivals
        self._next_layer = next(layers)

    @property
    def can_advance(self) -> bool:
        """Whether the next layer is whole."""
        return self._arrivals.is_whole(self._next_layer)

    def advance(self) -> bool:
        """Runs all layers that are whole. True when the step is over."""
        began = time.perf_counter()
        try:
            while self.can_advance:
                self._next_layer = next(self._layers)
        except StopIteration as end:
            self.logits = end.value
            return True
        finally:
            self.busy_seconds += time.perf_counter() - began
        return False


class LoadingSteps:
    """Steps of loading sequences that have begun and are not over, at most one for each."""

    def __init__(self, sequences: SequenceTable, runner: Runner) -> None:
        self._sequences, self._runner = sequences, runner
        self._steps: dict[Sequence, LoadingStep] = {}
        self.is_paused = False
        """None begins, so that those under way come to an end."""

    def has_begun(self, sequence: Sequence) -> bool:
        """Whether a step of it is under way."""
        return sequence in self._steps

    @property
    def are_under_way(self) -> bool:
        """Whether some step has begun and is not over: it knows blocks by their ids."""
        self.forget_ended()
        return bool(self._steps)

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks that steps under way hand over, or did already in some layers."""
        return sum(step.chunk.num_handed_blocks for step in self._steps.values())

    def step_of(self, sequence: Sequence, limits: Limits, now: float) -> LoadingStep | None:
        """The step of a loading sequence; begins one where the first layer is whole and `limits` allow it."""
        if sequence in self._steps:
            return self._steps[sequence]
        if self.is_paused:
            return None
        arrivals = self._sequences.arrivals(sequence)
        chunk = loading_chunk(sequence, limits) if arrivals.is_whole(self._runner.first_layer) else None
        if chunk is None:
            return None
        span = self._sequences.place(chunk, now)
        batch: RaggedBatch | None = None
        if span.end > span.first:
            batch = ragged_batch(self._sequences.rows, [], [span], limits.block_size)
            layers = self._runner.layerwise(batch, leaving([chunk]))
        else:
            layers = self._runner.copy_out_layerwise(leaving([chunk]))
        step = self._steps[sequence] = LoadingStep(chunk, span, batch, layers, arrivals)
        return step

    def forget_ended(self) -> None:
        """Drops steps of sequences that were aborted, failed or preempted."""
        self._steps = {one: step for one, step in self._steps.items() if one.is_loading}

    def end(self, step: LoadingStep) -> None:
        """The step is over, so all KV has come."""
        del self._steps[step.span.sequence]
        self._sequences.loaded(step.span.sequence)


class Incoming:
    """Writes go where the KV of their layer lies; `wrote` hears of the blocks."""

    def __init__(
        self,
        sequences: SequenceTable,
        loading: LoadingSteps,
        kv: WholeKv,
        whole: BlockLayout,
        wrote: Callable[[Iterable[int]], None],
    ) -> None:
        self._sequences, self._loading, self._kv, self._wrote = sequences, loading, kv, wrote
        self._num_layers, self._num_heads = kv.placement.num_layers, kv.placement.num_kv_heads
        self._shape = (self._num_heads, 2, whole.block_size, whole.head_dim)
        self._dtype = whole.dtype

    def write(self, sequence_id: str, layer: int, first_block: int, blocks: torch.Tensor) -> bool:
        """KV of one layer into reserved blocks; False where the sequence does not await KV (any more).

        Blocks found by name are skipped: others read them. Raises BadBlocks for a wrong shape or place.
        """
        sequence = self._sequences.by_id.get(sequence_id)
        if sequence is None or (sequence.is_begun and not sequence.is_loading):
            return False
        self._check(layer, blocks)
        end = first_block + len(blocks)
        arrivals = self._sequences.arrivals(sequence)
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
            self._sequences.loaded(sequence)
        return True

    def _check(self, layer: int, blocks: torch.Tensor) -> None:
        if not 0 <= layer < self._num_layers:
            raise BadBlocks(f"layer {layer} of {self._num_layers} does not exist")
        if blocks.shape[1:] != self._shape or blocks.dtype != self._dtype:
            raise BadBlocks(
                f"blocks of shape {tuple(blocks.shape)} and {blocks.dtype}; this pool's are "
                f"{(len(blocks), *self._shape)} and {self._dtype}"
            )
