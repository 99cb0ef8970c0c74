"""What of the Triton kernels can be known without the device that they are for."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import interpreted

from kernels.paged_attention.choose import choose_paged_attention
from kernels.rms_norm.choose import choose_rms_norm
from kernels.rotary.choose import choose_rotary
from kernels.swiglu.choose import choose_swiglu

PROGRAM = Path(__file__).with_name("compile_triton.py")
REPOSITORY = PROGRAM.parents[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_cuda_device_they_do_the_work(dtype: torch.dtype) -> None:
    attention = choose_paged_attention(torch.device("cuda"), dtype)
    assert isinstance(attention, interpreted("paged_attention").TritonAttention)
    chosen = [choose_rms_norm(True), choose_rotary(True), choose_swiglu(True)]
    assert chosen == [interpreted("rms_norm"), interpreted("rotary"), interpreted("swiglu")]


@pytest.mark.parametrize(("capability", "dtypes"), [(80, ["bf16"]), (90, ["fp32", "bf16"])])
def test_they_compile_for_a_cuda_device(capability: int, dtypes: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    compiled = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM, str(capability), *dtypes],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    sizes = re.findall(r"^(_\w+) .* (\d+)$", compiled.stdout, re.MULTILINE)
    assert {name for name, _ in sizes} == {"_write_kv", "_attend", "_rms_norm", "_rotate", "_silu_mul"}
    assert all(int(num_bytes) > 0 for _, num_bytes in sizes)
