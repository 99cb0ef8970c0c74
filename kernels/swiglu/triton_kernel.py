"""The gate of an MLP by Triton."""
# Device code is in Triton's language, which has no types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from kernels.triton_available import LAUNCH_OPTIONS

_COLUMNS = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2 * ff]`."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        with torch.cuda.device_of(out):
            _silu_mul[num_tokens, triton.cdiv(width, _COLUMNS)](
                gate_up, out, gate_up.stride(0), width, COLUMNS=_COLUMNS, **LAUNCH_OPTIONS
            )
    return out


@triton.jit
def _silu_mul(gate_up, out, stride, width, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + width + column, mask=inside, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * width + column, gated.to(out.dtype.element_ty), mask=inside)
