"""The arrays of one step where the model is, and as hosts hear them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.paged_attention.contract import AttentionBatch
from libs.engine.hosting.calls import BeginStep
from libs.engine.lent_part import LentPart, lent_part
from libs.engine.ragged import RaggedBatch
from libs.model.rotary import Rotary


@dataclass(frozen=True, eq=False)
class StepTensors:
    """Shared by all layers of one step. `lent` None: every block of it lies at home."""

    rotary: Rotary
    slots: torch.Tensor
    attention: AttentionBatch
    told: BeginStep
    lent: LentPart | None = None


def step_tensors(
    batch: RaggedBatch, rotary: Rotary, device: torch.device, *, first_lent: int | None, block_size: int
) -> StepTensors:
    """Of a batch; block ids from `first_lent` on are lent, None: none is."""
    told = BeginStep(
        batch.positions,
        batch.slots,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        batch.max_query_len,
        batch.max_context_len,
        batch.last_tokens,
    )
    attention = AttentionBatch(
        on_device(batch.block_tables, device),
        on_device(batch.context_lens, device),
        on_device(batch.query_starts, device),
        batch.max_query_len,
        batch.max_context_len,
    )
    lent = None if first_lent is None else lent_part(told, first_lent, block_size, device)
    return StepTensors(rotary, on_device(batch.slots, device), attention, told, lent)


def on_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device; no copy on the CPU, and on CUDA one that the host does not wait for."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
