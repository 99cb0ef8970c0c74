"""Runs one step through the layers, in the order that the placement gives."""

import math
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Rowwise
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import PagedAttention
from libs.engine.forward.ragged import RaggedBatch, StepTensors, on_device, step_tensors
from libs.engine.forward.remote_kv import WholeKv
from libs.engine.forward.split_attention import (
    HeadsAttention,
    LayerAttention,
    RemoteBlocksAttention,
    WholeAttention,
)
from libs.engine.hosting.calls import RunLayers
from libs.engine.memory.pool import Pool
from libs.engine.outputs import LayerOutput
from libs.engine.scheduling.scheduler import Chunk
from libs.engine.scheduling.sequence import Sequence
from libs.model.model import Model
from libs.placement.placement import LayerRun

Layerwise = Generator[int, None, torch.Tensor | None]
"""A step that yields each layer before it touches the layer's KV; returns the logits."""


class HandOverBudget:
    """How much KV may be on its way out at once: counts what was handed out and not released.

    When nothing is on its way, one block may always leave.
    """

    def __init__(self, limit_bytes: int, block_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._block_bytes = block_bytes
        self._out: set[LayerOutput] = set()
        self._out_bytes = 0

    @property
    def num_blocks(self) -> int:
        """Blocks, all layers of each, that may leave now."""
        left = max(0, self._limit_bytes - self._out_bytes) // self._block_bytes
        return max(left, 1) if not self._out else left

    @property
    def out_bytes(self) -> int:
        """Handed out and not released."""
        return self._out_bytes

    def take(self, output: LayerOutput) -> None:
        """One more is on its way."""
        self._out.add(output)
        self._out_bytes += output.blocks.nbytes

    def release(self, output: LayerOutput) -> None:
        """It arrived, or nobody wants it. Idempotent."""
        if output in self._out:
            self._out.remove(output)
            self._out_bytes -= output.blocks.nbytes


@dataclass(frozen=True)
class HandOver:
    """Blocks of one sequence that leave, layer by layer, as soon as a layer has filled them."""

    sequence_id: str
    first_block: int
    blocks: NDArray[np.int64]


class Runner:
    """Model, pool and attention of one worker, and where a step goes between them."""

    def __init__(
        self,
        model: Model,
        pool: Pool,
        kv: WholeKv,
        attention: PagedAttention,
        *,
        on_layers: Callable[[list[LayerOutput]], None],
        between_layers: Callable[[], None],
    ) -> None:
        self.model = model
        self.attention = attention
        self.on_layers = on_layers
        self.between_layers = between_layers
        self._pool, self._kv, self._hosts = pool, kv, kv.hosts
        self._scale = 1 / math.sqrt(model.config.head_dim)
        self.refresh(model)

    @property
    def first_layer(self) -> int:
        """The layer that a step runs first."""
        return 0

    def refresh(self, model: Model) -> None:
        """Takes model, placement and the pool's views anew, as after a change of them. Steps that are put
        aside are void."""
        self.model = model
        self._runs = list(self._kv.placement.layer_runs())
        home = self._kv.placement.owner
        own = [layer for run in self._runs if run.worker == home and not run.move_id for layer in run.layers]
        self._attention_of = {layer: self._attention(layer) for layer in own}
        self._num_own_blocks = self._pool.num_blocks if self._kv.placement.remote_blocks() else None

    def run(self, batch: RaggedBatch, hand_overs: Rowwise[HandOver]) -> torch.Tensor | None:
        """float32 logits `[N, vocab]` of the rows that want them, None where none does.

        Writes KV of all tokens. `on_layers` hears the hand-overs after each layer's KV is written. Raises
        HostLost.
        """
        layers = self.layerwise(batch, hand_overs)
        while True:
            try:
                next(layers)
            except StopIteration as end:
                logits: torch.Tensor | None = end.value
                return logits

    def layerwise(self, batch: RaggedBatch, hand_overs: Rowwise[HandOver]) -> Layerwise:
        """The same, stopping before each layer's KV is read or written; before those that a host runs, for
        all of these."""
        model, device = self.model, self.model.device
        hidden = model.embed(on_device(batch.token_ids, device))
        rotary = model.rotary(on_device(batch.positions, device))
        block_size = self._pool.layout.block_size
        step = step_tensors(batch, rotary, device, num_own_blocks=self._num_own_blocks, block_size=block_size)
        for run in self._runs:
            if run.move_id:
                yield from run.layers
                hidden = self._run_hosted(run, hidden, step, hand_overs)
                continue
            for layer in run.layers:
                q, k, v = model.attention_inputs(layer, hidden, rotary)
                yield layer
                attend = self._attention_of[layer].store(q, k, v, step)
                self._hand_over(range(layer, layer + 1), hand_overs)
                if layer == model.config.num_layers - 1:
                    if not len(batch.rows):
                        return None
                    hidden, attended = _wanted(batch, hidden, attend())
                else:
                    attended = attend()
                hidden = model.mlp(layer, model.attention_output(layer, hidden, attended))
                self.between_layers()
        return model.logits(hidden) if len(batch.rows) else None

    def copy_out(self, hand_overs: Rowwise[HandOver]) -> None:
        """Hands over blocks whose KV was found, not computed. Raises HostLost."""
        for _ in self.copy_out_layerwise(hand_overs):
            pass

    def copy_out_layerwise(self, hand_overs: Rowwise[HandOver]) -> Layerwise:
        """The same, stopping before each layer is copied."""
        for run in self._runs:
            if run.move_id:
                yield from run.layers
                self._hand_over(run.layers, hand_overs)
                continue
            for layer in run.layers:
                yield layer
                # What was found may go beyond a chunk that fills no block.
                self._hand_over(range(layer, layer + 1), hand_overs)
        return None

    def _run_hosted(
        self, run: LayerRun, hidden: torch.Tensor, step: StepTensors, hand_overs: Rowwise[HandOver]
    ) -> torch.Tensor:
        """Whole layers, run by the host that has them."""
        self._hosts.begin(run.worker, step.begin)
        answer = self._hosts.call(run.worker, RunLayers(run.move_id, hidden))
        self._hand_over(run.layers, hand_overs)
        hidden = self._hosts.wait(run.worker, answer).to(hidden.device)
        self.between_layers()
        return hidden

    def _hand_over(self, layers: range, hand_overs: Rowwise[HandOver]) -> None:
        """One call per layer, all KV heads, wherever they lie."""
        if not hand_overs:
            return
        num_heads = self.model.config.num_kv_heads
        blocks = [self._kv.read(layers, one.blocks) for one in hand_overs]
        for index, layer in enumerate(layers):
            heads = slice(index * num_heads, (index + 1) * num_heads)
            self.on_layers(
                [
                    LayerOutput(one.sequence_id, layer, one.first_block, kv[:, heads].contiguous())
                    for one, kv in zip(hand_overs, blocks, strict=True)
                ]
            )

    def _attention(self, layer: int) -> LayerAttention:
        placement, config = self._kv.placement, self.model.config
        kv = self._pool.layer(layer)
        own = WholeAttention(self.attention, kv, self._scale)
        if remote := placement.remote_blocks():
            return RemoteBlocksAttention(self.attention, kv, self._scale, self._hosts, layer, remote[0])
        if not (away := placement.heads_away(layer)):
            return own
        return HeadsAttention(
            own,
            self._hosts,
            layer,
            away,
            num_kv_heads=config.num_kv_heads,
            num_queries_per_head=config.num_heads // config.num_kv_heads,
        )


def _wanted(
    batch: RaggedBatch, hidden: torch.Tensor, attended: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that want logits: nothing reads the others any more after the last layer's attention."""
    if batch.last_tokens is None:
        return hidden, attended
    wanted = on_device(batch.last_tokens, hidden.device)
    return hidden[wanted], attended[wanted]


def leaving(chunks: Iterable[Chunk[Sequence]]) -> list[HandOver]:
    """What chunks that are placed hand over."""
    return [
        HandOver(one.sequence.id, first, np.array(one.sequence.blocks[first : first + one.num_handed_blocks]))
        for one in chunks
        if one.num_handed_blocks
        for first in [one.sequence.num_handed_blocks]
    ]
