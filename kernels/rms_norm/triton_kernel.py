"""RMS norm by Triton: one program for each row."""
# Device code is in Triton's language, which has no types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from kernels.triton_available import LAUNCH_OPTIONS


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dim of `[T, d]` or `[T, H, d]`."""
    x = _with_packed_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    width = x.shape[-1]
    inner_rows = x.shape[1] if x.dim() == 3 else 1
    with torch.cuda.device_of(x):
        _rms_norm[(x.shape[0] * inner_rows,)](
            x,
            weight,
            out,
            x.stride(0),
            inner_rows,
            width,
            eps,
            COLUMNS=triton.next_power_of_2(width),
            **LAUNCH_OPTIONS,
        )
    return out


def _with_packed_rows(x: torch.Tensor) -> torch.Tensor:
    packed = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if packed else x.contiguous()


@triton.jit
def _rms_norm(x, weight, out, stride, inner_rows, width, eps, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    at = row // inner_rows * stride + row % inner_rows * width + column
    exact = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    normed = exact * tl.rsqrt(tl.sum(exact * exact, axis=0) / width + eps)
    scaled = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * normed
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)
