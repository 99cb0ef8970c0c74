"""Products with packed weights by the native kernel."""

import ctypes
import functools
from pathlib import Path

import torch

from kernels.linear.packing import pack, pack_gated, unpack, unpack_gated
from kernels.native.native_library import IS_FLOAT32, bind, num_threads
from kernels.swiglu.choose import silu_mul

_SIGNATURE = "iiplppppllli"
_BFLOAT16_TO_FLOAT32 = 2
WIDE_ROWS = 33
"""From so many rows on oneDNN's AMX tiles beat the kernel's dot products."""


@functools.cache
def has_amx() -> bool:
    """Whether torch can multiply bfloat16 by AMX tiles here."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " amx_bf16" in cpuinfo.read_text()


def supports(weight: torch.Tensor) -> bool:
    """Whether the native kernel knows this weight's dtype and shape."""
    return weight.dtype in IS_FLOAT32 and weight.dim() == 2 and min(weight.shape) > 0


class _Packed:
    """What both kinds of packed weight share: the call, and the plain copy that only AMX machines keep."""

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
    ) -> None:
        self.bias = bias
        self._shape = weight.shape[0], weight.shape[1]
        self._gated = gated
        self._multiply = bind(library, "kvmesh_linear", _SIGNATURE)
        pack_columns = pack_gated if gated else pack
        self._packed = pack_columns(weight)
        packed_bias = None if bias is None else pack_columns(bias.to(torch.float32)[:, None])
        self._packed_bias = packed_bias
        self._plain = weight if weight.dtype == torch.bfloat16 and has_amx() else None
        self._pointers = self._packed.data_ptr(), None if packed_bias is None else packed_bias.data_ptr()
        self._num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
        self._num_words = self._packed.shape[1]
        self._kind = IS_FLOAT32[weight.dtype]

    def _run(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, kind: int | None = None
    ) -> torch.Tensor:
        num_rows, depth = x.shape
        if depth != self._shape[1] or x.dtype != self._packed.dtype:
            raise ValueError(
                f"a {self._packed.dtype} weight {list(self._shape)} cannot take {x.dtype} {list(x.shape)}"
            )
        if depth % self._packed.shape[3]:
            x = torch.nn.functional.pad(x, (0, 1))  # the kernel reads whole words
        elif x.stride(1) != 1:
            x = x.contiguous()
        out_dtype = torch.float32 if kind == _BFLOAT16_TO_FLOAT32 else x.dtype
        out = torch.empty((num_rows, self._num_columns), dtype=out_dtype)
        self._multiply(
            self._kind if kind is None else kind,
            self._gated,
            x.data_ptr(),
            x.stride(0),
            *self._pointers,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            num_rows,
            self._num_columns,
            self._num_words,
            num_threads(),
        )
        return out


class PackedLinear(_Packed):
    """A linear layer whose weight is kept packed, in one copy (two on machines with AMX)."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(library, weight, bias, gated=False)
        self._gather = bind(library, "kvmesh_linear_rows", "pllplpi", counts=True)

    @property
    def weight(self) -> torch.Tensor:
        """The weight `[N, K]`; unpacked on each call unless a plain copy is kept."""
        return self._plain if self._plain is not None else unpack(self._packed, self._shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias`."""
        if self._plain is not None and x.shape[0] >= WIDE_ROWS:
            return torch.nn.functional.linear(x, self._plain, self.bias)
        return self._run(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + self(x)`, rounded once."""
        if self._plain is not None and x.shape[0] >= WIDE_ROWS:
            return residual + torch.nn.functional.linear(x, self._plain, self.bias)
        if residual.shape != (x.shape[0], self._shape[0]) or residual.dtype != x.dtype:
            raise ValueError(
                f"the residual must be {x.dtype} {[x.shape[0], self._shape[0]]}, "
                f"not {residual.dtype} {list(residual.shape)}"
            )
        return self._run(x, residual.contiguous())

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T + bias` as float32, never rounded to x's dtype."""
        return self._run(x, kind=_BFLOAT16_TO_FLOAT32 if x.dtype == torch.bfloat16 else None)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weight."""
        if self._plain is not None:
            return torch.nn.functional.embedding(indices, self._plain)
        indices = indices.contiguous()
        if indices.dim() != 1 or indices.dtype != torch.int64:
            raise ValueError(f"rows takes int64 [T], not {indices.dtype} {list(indices.shape)}")
        per_word = self._packed.shape[3]
        out = torch.empty((indices.shape[0], self._num_words * per_word), dtype=self._packed.dtype)
        num_wrong = self._gather(
            self._packed.data_ptr(),
            self._num_columns,
            self._num_words,
            indices.data_ptr(),
            indices.shape[0],
            out.data_ptr(),
            num_threads(),
        )
        if num_wrong:
            raise IndexError(
                f"{num_wrong} of {list(indices.shape)} indices are not in [0, {self._num_columns})"
            )
        return out[:, : self._shape[1]].contiguous()


class PackedGatedLinear(_Packed):
    """Gate and up projections whose columns lie side by side, so that the gate is applied in registers."""

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(library, weight, bias, gated=True)

    @property
    def weight(self) -> torch.Tensor:
        """The weight `[2 * ff, K]`; unpacked on each call unless a plain copy is kept."""
        return self._plain if self._plain is not None else unpack_gated(self._packed, self._shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(x @ gate.T) * (x @ up.T)`."""
        if self._plain is not None and x.shape[0] >= WIDE_ROWS:
            return silu_mul(torch.nn.functional.linear(x, self._plain, self.bias))
        return self._run(x)
