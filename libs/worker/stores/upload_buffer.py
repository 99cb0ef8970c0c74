"""Collects the new full blocks of one prompt as they are handed over, for the KV stores."""

from collections.abc import Sequence

import torch

from libs.engine.outputs import LayerOutput
from libs.worker.stores.prefix_lookup import PrefixLookup
from libs.worker.stores.upload_part import UploadPart


class UploadBuffer:
    """Blocks of a prompt named `names` that stores lack: from the first such to the last. Keeps tensors,
    copies none."""

    def __init__(
        self, names: Sequence[bytes], found: PrefixLookup, num_layers: int, *, request_id: str = ""
    ) -> None:
        """Something must be missing."""
        self.names, self._found, self._request_id = names, found, request_id
        missing = found.missing
        self.blocks = range(missing[0].start, missing[-1].stop)
        self._num_layers = num_layers
        self.restart()

    def restart(self) -> None:
        """Forget what was collected: the prompt is computed again."""
        self._pieces: list[list[torch.Tensor]] = [[] for _ in range(self._num_layers)]
        self._num_blocks = [0] * self._num_layers

    @property
    def is_complete(self) -> bool:
        """Whether all layers of all blocks are there."""
        return all(count == len(self.blocks) for count in self._num_blocks)

    @property
    def last_names(self) -> list[bytes]:
        """Names of the last block of each run."""
        return [self.names[run.missing[-1]] for run in self._found.runs if run.missing]

    def collect(self, output: LayerOutput) -> None:
        """Keep what belongs to it. Blocks come in order, each once per layer."""
        first = max(0, self.blocks.start + self._num_blocks[output.layer] - output.first_block)
        end = min(output.blocks.shape[0], self.blocks.stop - output.first_block)
        if first < end:
            self._pieces[output.layer].append(output.blocks[first:end])
            self._num_blocks[output.layer] += end - first

    def parts(self) -> list[tuple[str, UploadPart]]:
        """What goes to which store, by its name; run by run, so that a store needs little room at a time, in
        order of the chain."""
        return [(run.store, self._part(run.missing)) for run in self._found.runs if run.missing]

    def _part(self, blocks: range) -> UploadPart:
        return UploadPart(
            names=self.names[blocks.start : blocks.stop],
            parent=self.names[blocks.start - 1] if blocks.start else b"",
            take_layers=lambda layers: self._layers_of(blocks, layers),
            request_id=self._request_id,
        )

    def _layers_of(self, blocks: range, layers: range) -> torch.Tensor:
        pieces = [piece for layer in layers for piece in self._pieces_of(blocks, layer)]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)

    def _pieces_of(self, blocks: range, layer: int) -> list[torch.Tensor]:
        """Views of what was collected of one layer."""
        views: list[torch.Tensor] = []
        first = self.blocks.start
        for piece in self._pieces[layer]:
            start, stop = max(0, blocks.start - first), min(len(piece), blocks.stop - first)
            if start < stop:
                views.append(piece[start:stop])
            first += len(piece)
        return views
