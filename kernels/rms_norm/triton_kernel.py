"""RMS norm by Triton: one program for each row."""
# Device code is in Triton's language, which has no types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last dim of `[T, d]` or `[T, H, d]`."""
    x = _with_packed_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`."""
    x, residual = _with_packed_rows(x), residual.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, total, out, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
) -> None:
    if not x.numel():
        return
    width = x.shape[-1]
    inner_rows = x.shape[1] if x.dim() == 3 else 1
    with torch.cuda.device_of(x):
        _rms_norm[(x.shape[0] * inner_rows,)](
            x,
            residual,
            weight,
            total,
            out,
            x.stride(0),
            inner_rows,
            width,
            eps,
            COLUMNS=triton.next_power_of_2(width),
        )


def _with_packed_rows(x: torch.Tensor) -> torch.Tensor:
    packed = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2])
    return x if packed else x.contiguous()


@triton.jit
def _rms_norm(x, residual, weight, total, out, stride, inner_rows, width, eps, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    at = row // inner_rows * stride + row % inner_rows * width + column
    values = tl.load(x + at, mask=inside, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * width + column, mask=inside, other=0.0)
        # Rounded before it is normed: what the next layer adds to is what this one saw.
        values = (values.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * width + column, values, mask=inside)
    exact = values.to(tl.float32)
    normed = exact * tl.rsqrt(tl.sum(exact * exact, axis=0) / width + eps)
    scaled = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) * normed
    tl.store(out + row * width + column, scaled.to(out.dtype.element_ty), mask=inside)
