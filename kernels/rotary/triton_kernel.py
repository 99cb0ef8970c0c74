"""Rotary embedding by Triton: one program for each token."""
# Device code is in Triton's language, which has no types.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportArgumentType=false
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from kernels.triton_available import LAUNCH_OPTIONS


def rotate_(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q and k `[T, H, hd]` in place."""
    num_tokens, num_q_heads, head_dim = q.shape
    if not num_tokens:
        return
    cos, sin = cos.to(torch.float32).contiguous(), sin.to(torch.float32).contiguous()
    with torch.cuda.device_of(q):
        _rotate[(num_tokens,)](
            q,
            k,
            cos,
            sin,
            *q.stride(),
            *k.stride(),
            num_q_heads,
            k.shape[1],
            head_dim // 2,
            Q_HEADS=triton.next_power_of_2(num_q_heads),
            K_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=triton.next_power_of_2(head_dim // 2),
            **LAUNCH_OPTIONS,
        )


@triton.jit
def _rotate(
    q,
    k,
    cos,
    sin,
    q_token_stride,
    q_head_stride,
    q_stride,
    k_token_stride,
    k_head_stride,
    k_stride,
    num_q_heads,
    num_k_heads,
    half,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HALF)
    c = tl.load(cos + token * half + dim, mask=dim < half, other=0.0)[None]
    s = tl.load(sin + token * half + dim, mask=dim < half, other=0.0)[None]
    _rotate_heads(q + token * q_token_stride, c, s, q_head_stride, q_stride, num_q_heads, half, Q_HEADS, HALF)
    _rotate_heads(k + token * k_token_stride, c, s, k_head_stride, k_stride, num_k_heads, half, K_HEADS, HALF)


@triton.jit
def _rotate_heads(x, c, s, head_stride, stride, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    head, dim = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None]
    inside = (head < num_heads) & (dim < half)
    at = x + head * head_stride + dim * stride
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + half * stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * c - second * s).to(x.dtype.element_ty), mask=inside)
    tl.store(at + half * stride, (second * c + first * s).to(x.dtype.element_ty), mask=inside)
