"""A program: compiles every Triton kernel for a CUDA device that need not be there; prints what came of it.

Its arguments are the compute capability, 90 for 9.0, and the dtypes.
"""

import sys
import types

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.paged_attention import triton_kernel as paged_attention
from kernels.rms_norm import triton_kernel as rms_norm
from kernels.rotary import triton_kernel as rotary
from kernels.swiglu import triton_kernel as swiglu
from kernels.triton_available import LAUNCH_OPTIONS

ENTRIES = {
    paged_attention: ("_write_kv", "_attend"),
    rms_norm: ("_rms_norm",),
    rotary: ("_rotate",),
    swiglu: ("_silu_mul",),
}
FIXED = {
    "NUM_ELEMENTS": 192,
    "COLUMNS": 256,
    "HEAD_DIM": 64,
    "BLOCK_SIZE": 16,
    "GROUP": 3,
    "PADDED_DIM": 64,
    "ROWS": 16,
    "KEYS": 32,
    "Q_HEADS": 16,
    "K_HEADS": 4,
    "HALF": 32,
}
INTEGERS = {"slots": "*i64", "tables": "*i32", "context_lens": "*i32", "query_starts": "*i32"}
FLOATS = {"scale_log2": "fp32", "eps": "fp32", "lse": "*fp32", "cos": "*fp32", "sin": "*fp32"}
TENSORS = ("q", "k", "v", "kv", "out", "x", "weight", "gate_up")
OPTIONAL = "lse"
"""None in some launches."""


def compile_entry(module: types.ModuleType, name: str, dtype: str, capability: int, *, is_full: bool) -> None:
    entry = getattr(module, name)
    tensors = dict.fromkeys(TENSORS, f"*{dtype}")
    absent = {} if is_full else {OPTIONAL: None}
    fixed = {name: value for name, value in (FIXED | absent).items() if name in entry.arg_names}
    known = INTEGERS | tensors | FLOATS | dict.fromkeys(fixed, "constexpr")
    signature = {argument: known.get(argument, "i32") for argument in entry.arg_names}
    constants = {(entry.arg_names.index(argument),): value for argument, value in fixed.items()}
    source = ASTSource(fn=entry, signature=signature, constexprs=constants)
    options = {"num_stages": 2, **LAUNCH_OPTIONS}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(name, dtype, "full" if is_full else "plain", len(compiled.asm["cubin"]))


def main() -> None:
    capability, dtypes = int(sys.argv[1]), sys.argv[2:]
    for module, names in ENTRIES.items():
        for name in names:
            has_optional = OPTIONAL in getattr(module, name).arg_names
            for dtype in dtypes:
                for is_full in (True, False) if has_optional else (True,):
                    compile_entry(module, name, dtype, capability, is_full=is_full)


if __name__ == "__main__":
    main()
