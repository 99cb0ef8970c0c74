"""KV of a begun sequence that is still on its way in, and the step that follows it layer by layer.

A step that has run out of whole layers does not wait: it is put aside, others run, and it goes on where it
stopped once its next layer is whole. So nothing can hang on writes that never come.
"""

import time
from collections.abc import Generator

import torch

from libs.engine.arrivals import Arrivals
from libs.engine.ragged import RaggedBatch, Span
from libs.engine.scheduler import Chunk
from libs.engine.sequence import Sequence

Layerwise = Generator[int, None, torch.Tensor | None]
"""Yields each layer before the layer's KV is touched; returns the logits."""


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
