"""The native library: built once, by whoever comes first, and torch where it cannot be built."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native.build import BuildFailed, build, build_key, find_compiler, loaded_openmp

pytestmark = pytest.mark.timeout(120)  # child programs import torch and compile
NEEDS_COMPILER = pytest.mark.skipif(sys.platform != "linux", reason="native kernels are for Linux")
SMALL = 'extern "C" int kvmesh_answer() { return ANSWER; }\n'
PROGRAM = """
import ctypes, sys
from pathlib import Path
import torch
from kernels.native import native_library as library
library.kernel_sources = lambda: [Path(sys.argv[1])]
found = library.native_library()
print("answer", found and found.kvmesh_answer())
assert library.native_library() is found
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    try:
        find_compiler()
    except BuildFailed as absent:
        pytest.skip(str(absent))
    path = tmp_path / "small.cpp"
    path.write_text(SMALL.replace("ANSWER", "41"))
    return path


def start(program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )


def output(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    return printed


def test_a_second_process_finds_what_the_first_built(source: Path, tmp_path: Path) -> None:
    first = output(start(PROGRAM, source, XDG_CACHE_HOME=str(tmp_path)))
    second = output(start(PROGRAM, source, XDG_CACHE_HOME=str(tmp_path)))
    assert first.count("native_kernels_built") == 1
    assert "native_kernels_built" not in second
    assert "answer 41" in first
    assert "answer 41" in second


def test_processes_that_build_at_once_all_get_the_library(source: Path, tmp_path: Path) -> None:
    racing = [start(PROGRAM, source, XDG_CACHE_HOME=str(tmp_path)) for _ in range(3)]
    assert all("answer 41" in output(process) for process in racing)
    assert [path.suffix for path in (tmp_path / "kvmesh").iterdir()] == [".so"]


def test_a_library_that_was_cut_short_is_built_again(source: Path, tmp_path: Path) -> None:
    output(start(PROGRAM, source, XDG_CACHE_HOME=str(tmp_path)))
    (built,) = (tmp_path / "kvmesh").iterdir()
    built.write_bytes(built.read_bytes()[:100])
    again = output(start(PROGRAM, source, XDG_CACHE_HOME=str(tmp_path)))
    assert "native_kernels_built" in again
    assert "answer 41" in again


def test_a_cache_that_cannot_be_written_does_not_stop_the_build(source: Path, tmp_path: Path) -> None:
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    assert "answer 41" in output(start(PROGRAM, source, XDG_CACHE_HOME=str(not_a_folder)))


def test_without_a_compiler_torch_computes_and_one_line_says_so() -> None:
    program = """
import torch
from kernels.linear.choose import pack_linear
from kernels.rms_norm.choose import rms_norm
from kernels.paged_attention.choose import choose_paged_attention
weight = torch.randn(8, 4)
print(torch.equal(pack_linear(weight)(weight), weight @ weight.T), rms_norm(weight, weight[0], 1e-5).shape)
print(type(choose_paged_attention(torch.device("cpu"), torch.float32)).__name__)
"""
    printed = output(start(program, CXX="no-such-compiler"))
    assert printed.count("native_kernels_unavailable") == 1
    assert "no-such-compiler" in printed
    assert "TorchAttention" in printed


def test_a_refused_source_is_told_with_the_compilers_words(source: Path, tmp_path: Path) -> None:
    source.write_text("this is no C++")
    target = tmp_path / "out" / "library.so"
    target.parent.mkdir()
    with pytest.raises(BuildFailed, match="error"):
        build([source], tmp_path, find_compiler(), loaded_openmp(), target)
    assert list(target.parent.iterdir()) == []


def test_another_source_has_another_key(source: Path) -> None:
    before = build_key([source], find_compiler(), loaded_openmp())
    assert build_key([source], find_compiler(), loaded_openmp()) == before
    source.write_text(SMALL.replace("ANSWER", "42"))
    assert build_key([source], find_compiler(), loaded_openmp()) != before


@NEEDS_COMPILER
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    program = """
from pathlib import Path
import torch
from kernels.linear.choose import pack_linear
pack_linear(torch.randn(64, 64))(torch.randn(3, 64))
print(Path("/proc/self/maps").read_text())
"""
    runtimes = set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", output(start(program))))
    assert len(runtimes) == 1
