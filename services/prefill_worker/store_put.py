"""Collects the new full blocks of one prompt as they are handed over, for the KV store."""

import torch

from libs.engine.outputs import LayerOutput


class StorePut:
    """Blocks `first_block` to the last full one of a prompt, named `names`. Keeps tensors, copies none."""

    def __init__(self, names: list[bytes], first_block: int, num_layers: int) -> None:
        self.names, self._first_block = names, first_block
        self._pieces: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._num_blocks = [0] * num_layers

    @property
    def is_complete(self) -> bool:
        """Whether all layers of all blocks are there."""
        return bool(self.names) and all(count == len(self.names) for count in self._num_blocks)

    def collect(self, output: LayerOutput) -> None:
        """Keep what belongs to it. Blocks come in order, each once per layer."""
        first = max(0, self._first_block + self._num_blocks[output.layer] - output.first_block)
        end = min(output.blocks.shape[0], self._first_block + len(self.names) - output.first_block)
        if first < end:
            self._pieces[output.layer].append(output.blocks[first:end])
            self._num_blocks[output.layer] += end - first

    def take_layers(self, layers: range) -> torch.Tensor:
        """The blocks of these layers, one after another, contiguous; they are no longer kept here."""
        pieces: list[torch.Tensor] = []
        for layer in layers:
            pieces += self._pieces[layer]
            self._pieces[layer] = []
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)
