"""Which paged attention fits a device and a dtype."""

import torch

from kernels.native.native_library import native_library
from kernels.paged_attention.contract import PagedAttention
from kernels.paged_attention.cpu import NativeAttention, supports
from kernels.paged_attention.torch_sdpa import TorchAttention


def choose_paged_attention(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The fastest attention that runs here; torch's own where no other does."""
    if device.type == "cpu" and supports(dtype) and (library := native_library()) is not None:
        return NativeAttention(library)
    return TorchAttention()
