"""Runs one step through the layers, in the order that the placement gives."""

import math
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Rowwise
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import AttentionBatch, PagedAttention
from libs.engine.outputs import LayerOutput
from libs.engine.pool import Pool
from libs.engine.ragged import RaggedBatch
from libs.engine.scheduler import Chunk
from libs.engine.sequence import Sequence
from libs.model.model import Model
from libs.placement.placement import Placement

Layerwise = Generator[int, None, torch.Tensor | None]
"""A step that yields each layer before it touches the layer's KV; returns the logits."""


@dataclass(frozen=True)
class HandOver:
    """Blocks of one sequence that leave, layer by layer, as soon as a layer has filled them."""

    sequence_id: str
    first_block: int
    blocks: list[int]


class Runner:
    """Model, pool and attention of one worker, and where a step goes between them."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        placement: Placement,
        attention: PagedAttention,
        *,
        on_layers: Callable[[list[LayerOutput]], None],
        between_layers: Callable[[], None],
    ) -> None:
        self.model = model
        self.pool = pool
        self.attention = attention
        self.on_layers = on_layers
        self.between_layers = between_layers
        self._layers = [layer for run in placement.layer_runs() for layer in run.layers]
        self._scale = 1 / math.sqrt(model.config.head_dim)
        self.refresh()

    @property
    def first_layer(self) -> int:
        """The layer that a step runs first."""
        return self._layers[0]

    def refresh(self) -> None:
        """Takes the pool's views anew, as after a change of its layout."""
        self._kv = [self.pool.layer(layer) for layer in self._layers]

    def run(self, batch: RaggedBatch, hand_overs: Rowwise[HandOver]) -> torch.Tensor | None:
        """float32 logits `[N, vocab]` of the rows that want them, None where none does.

        Writes KV of all tokens into the pool. `on_layers` hears the hand-overs after each layer's KV is
        written.
        """
        layers = self.layerwise(batch, hand_overs)
        while True:
            try:
                next(layers)
            except StopIteration as end:
                logits: torch.Tensor | None = end.value
                return logits

    def layerwise(self, batch: RaggedBatch, hand_overs: Rowwise[HandOver]) -> Layerwise:
        """The same, stopping before each layer's KV is read or written."""
        model, device = self.model, self.model.device
        hidden = model.embed(_tensor(batch.token_ids, device))
        rotary = model.rotary(_tensor(batch.positions, device))
        slots = _tensor(batch.slots, device)
        attention_batch = AttentionBatch(
            _tensor(batch.block_tables, device),
            _tensor(batch.context_lens, device),
            _tensor(batch.query_starts, device),
            batch.max_query_len,
            batch.max_context_len,
        )
        leaving = self._leaving(hand_overs)
        last = self._layers[-1]
        for layer, kv in zip(self._layers, self._kv, strict=True):
            q, k, v = model.attention_inputs(layer, hidden, rotary)
            yield layer
            self.attention.write_kv(k, v, kv, slots)
            if leaving:
                self._hand_over(layer, kv, leaving)
            if layer == last and not len(batch.rows):
                return None
            attended = self.attention.attend(q, kv, attention_batch, self._scale)
            if layer == last and batch.last_tokens is not None:
                wanted = _tensor(batch.last_tokens, device)  # nothing reads the other rows any more
                hidden, attended = hidden[wanted], attended[wanted]
            hidden = model.mlp(layer, model.attention_output(layer, hidden, attended))
            self.between_layers()
        return model.logits(hidden)

    def copy_out(self, hand_overs: Rowwise[HandOver]) -> None:
        """Hands over blocks whose KV was found, not computed."""
        for _ in self.copy_out_layerwise(hand_overs):
            pass

    def copy_out_layerwise(self, hand_overs: Rowwise[HandOver]) -> Layerwise:
        """The same, stopping before each layer is copied."""
        leaving = self._leaving(hand_overs)
        for layer, kv in zip(self._layers, self._kv, strict=True):
            yield layer
            if leaving:  # What was found may go beyond a chunk that fills no block.
                self._hand_over(layer, kv, leaving)
        return None

    def _leaving(self, hand_overs: Rowwise[HandOver]) -> list[tuple[HandOver, torch.Tensor]]:
        device = self.model.device
        return [(one, torch.tensor(one.blocks, dtype=torch.int64).to(device)) for one in hand_overs]

    def _hand_over(self, layer: int, kv: torch.Tensor, leaving: list[tuple[HandOver, torch.Tensor]]) -> None:
        self.on_layers(
            [
                LayerOutput(one.sequence_id, layer, one.first_block, kv.index_select(0, blocks))
                for one, blocks in leaving
            ]
        )


def leaving(chunks: Iterable[Chunk[Sequence]]) -> list[HandOver]:
    """What chunks that are placed hand over."""
    return [
        HandOver(one.sequence.id, first, one.sequence.blocks[first : first + one.num_handed_blocks])
        for one in chunks
        if one.num_handed_blocks
        for first in [one.sequence.num_handed_blocks]
    ]


def _tensor(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device; no copy on the CPU, and on CUDA one that the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
