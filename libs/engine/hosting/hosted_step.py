"""The arrays of an owner's step as the host uses them: checked once, since kernels trust them."""

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import AttentionBatch
from libs.engine.errors import EngineError
from libs.engine.hosting.calls import BeginStep
from libs.model.model import Model
from libs.model.rotary import Rotary


class BadCall(EngineError):
    """An owner's call does not fit its modules here; says why."""


class HostedStep:
    """One step. Raises BadCall for arrays that fit neither each other nor any cache."""

    def __init__(self, begun: BeginStep, block_size: int, device: torch.device) -> None:
        _check(begun, block_size)
        self.begun = begun
        self.num_tokens = len(begun.slots)
        self.slots = tensor_of(begun.slots, device)
        self.batch = AttentionBatch(
            tensor_of(begun.block_tables, device),
            tensor_of(begun.context_lens, device),
            tensor_of(begun.query_starts, device),
            int(np.diff(begun.query_starts).max(initial=0)),
            int(begun.context_lens.max(initial=0)),
        )
        self.last_tokens = None if begun.last_tokens is None else tensor_of(begun.last_tokens, device)
        self.end_block = 1 + highest_block(begun, block_size)
        """Behind the highest block that the step reads or writes."""
        self._rotary: Rotary | None = None
        self._device = device

    def rotary(self, model: Model) -> Rotary:
        """Angles of the step's positions, the same for all layers."""
        if self._rotary is None:
            self._rotary = model.rotary(tensor_of(self.begun.positions, self._device))
        return self._rotary


def used_blocks(begun: BeginStep, block_size: int) -> NDArray[np.bool_]:
    """Which entries of the block tables hold context; the rest is not read."""
    counts = -(-begun.context_lens // block_size)
    used: NDArray[np.bool_] = np.arange(begun.block_tables.shape[1])[None] < counts[:, None]
    return used


def highest_block(begun: BeginStep, block_size: int) -> int:
    """The highest block id that the step reads or writes; -1 where there is none."""
    used = begun.block_tables[used_blocks(begun, block_size)]
    return int(max(used.max(initial=-1), begun.slots.max(initial=-1) // block_size))


def tensor_of(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device; shares its memory where it may."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = array.copy()  # as it came off a wire; torch takes no read-only memory
    return torch.from_numpy(array).to(device)


def _check(begun: BeginStep, block_size: int) -> None:
    num_tokens, (num_sequences, max_blocks) = len(begun.slots), begun.block_tables.shape
    shapes: dict[str, tuple[NDArray[np.generic], type[np.generic], int]] = {
        "positions": (begun.positions, np.int64, num_tokens),
        "slots": (begun.slots, np.int64, num_tokens),
        "context_lens": (begun.context_lens, np.int32, num_sequences),
        "query_starts": (begun.query_starts, np.int32, num_sequences + 1),
    }
    for name, (array, dtype, length) in shapes.items():
        if array.dtype != dtype or array.shape != (length,):
            raise BadCall(f"{name} is {array.dtype} {list(array.shape)}, not {dtype.__name__} [{length}]")
    if begun.block_tables.dtype != np.int32:
        raise BadCall(f"block_tables is {begun.block_tables.dtype}, not int32")
    starts, contexts = begun.query_starts, begun.context_lens
    if starts[0] != 0 or starts[-1] != num_tokens or (np.diff(starts) < 0).any():
        raise BadCall(f"query_starts does not rise from 0 to the {num_tokens} tokens of the step")
    if contexts.min(initial=0) < 0 or contexts.max(initial=0) > max_blocks * block_size:
        raise BadCall(f"context_lens is not within the {max_blocks} blocks of {block_size} that tables have")
    if (
        begun.slots.min(initial=0) < 0
        or begun.block_tables[used_blocks(begun, block_size)].min(initial=0) < 0
    ):
        raise BadCall("slots or blocks below 0")
    last = begun.last_tokens
    if last is not None and (
        last.dtype != np.int64 or last.min(initial=0) < 0 or last.max(initial=-1) >= num_tokens
    ):
        raise BadCall(f"last_tokens are not rows of the {num_tokens} tokens of the step")
