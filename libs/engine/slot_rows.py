"""Blocks by their slots, for copies of some slots of one block at a time.

On the CPU through numpy, which copies a slot as one run of bytes: twice as fast as torch's index kernels,
which go element by element.
"""

import numpy as np
import torch
from numpy.typing import NDArray


class SlotRows:
    """`blocks` is contiguous, `[num_blocks, slots, 2, block_size, head_dim]`; it is written in place."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._torch = blocks
        self._bytes: NDArray[np.uint8] | None = None
        self._zeros = np.empty((0, 0), dtype=np.uint8)
        if blocks.device.type == "cpu":
            self._bytes = blocks.flatten(2).view(torch.uint8).numpy()

    def copy(
        self,
        block: int,
        slots: NDArray[np.int64],
        source: "SlotRows",
        theirs: int,
        their_slots: NDArray[np.int64],
    ) -> None:
        """Slots of a block get what other slots of another block hold; source and target may overlap."""
        if self._bytes is not None and source._bytes is not None:
            self._bytes[block][slots] = source._bytes[theirs][their_slots]
            return
        device = self._torch.device
        picked = source._torch[theirs][torch.from_numpy(their_slots).to(source._torch.device)]
        self._torch[block][torch.from_numpy(slots).to(device)] = picked.to(device)

    def clear(self, block: int, slots: NDArray[np.int64]) -> None:
        """Zeros slots of a block."""
        if self._bytes is not None:
            if len(self._zeros) != len(slots):  # rows to copy are faster to write than a scalar
                self._zeros = np.zeros((len(slots), self._bytes.shape[2]), dtype=np.uint8)
            self._bytes[block][slots] = self._zeros
        else:
            self._torch[block][torch.from_numpy(slots).to(self._torch.device)] = 0
