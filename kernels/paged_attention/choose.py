"""Which paged attention fits a device and a dtype."""

import torch

from kernels.paged_attention.contract import PagedAttention
from kernels.paged_attention.reference import ReferenceAttention


def choose_paged_attention(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The fastest attention that runs here; the torch reference where no other does."""
    return ReferenceAttention()
