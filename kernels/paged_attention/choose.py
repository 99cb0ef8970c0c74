"""Which paged attention fits a device and a dtype."""

import torch

from kernels.native.native_library import native_library
from kernels.paged_attention.contract import PagedAttention
from kernels.paged_attention.cpu import NativeAttention, supports
from kernels.paged_attention.torch_sdpa import TorchAttention
from kernels.triton_available import has_triton


def choose_paged_attention(device: torch.device, dtype: torch.dtype) -> PagedAttention:
    """The fastest attention that runs here; torch's own where no other does."""
    if device.type == "cpu" and supports(dtype) and (library := native_library()) is not None:
        return NativeAttention(library)
    if device.type == "cuda" and has_triton():
        from kernels.paged_attention.triton_kernel import TritonAttention

        return TritonAttention()
    return TorchAttention()
