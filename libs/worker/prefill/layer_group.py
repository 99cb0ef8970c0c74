"""Layers of one chunk that share a frame on their way to the decode worker."""

import time

import torch

from libs.engine.outputs import LayerOutput
from libs.kv.layer_groups import layers_per_frame


class LayerGroup:
    """The same blocks of consecutive layers, taken as they come until the frame is worth sending."""

    def __init__(self, first: LayerOutput, num_layers: int) -> None:
        self.outputs = [first]
        self.made_at = time.monotonic()
        self._last_layer = num_layers - 1
        self._max_layers = layers_per_frame(num_layers, first.blocks.nbytes)

    @property
    def is_full(self) -> bool:
        """Whether to send it now. After a chunk's last layer nothing more comes soon."""
        return len(self.outputs) >= self._max_layers or self.outputs[-1].layer == self._last_layer

    def takes(self, output: LayerOutput) -> bool:
        """Whether this output can follow those here."""
        last = self.outputs[-1]
        is_same_blocks = output.first_block == last.first_block and output.blocks.shape == last.blocks.shape
        return is_same_blocks and output.layer == last.layer + 1

    def joined(self) -> torch.Tensor:
        """The blocks of all its layers, one after another, contiguous."""
        return (
            torch.cat([output.blocks for output in self.outputs])
            if self.outputs[1:]
            else self.outputs[0].blocks
        )
