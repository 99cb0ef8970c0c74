"""Compiles C++ sources into one shared library, for exactly the machine it runs on.

The result lies in a cache folder under a name that hashes everything it depends on: sources, flags, compiler,
processor. Several processes may build at once: each compiles into files of its own and renames atomically.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
_COMPILERS = ("g++", "clang++", "c++")
_STEP_TIMEOUT_SECONDS = 300.0


class BuildFailed(Exception):
    """The library could not be made; the message says which step and what it printed."""


def find_compiler() -> Path:
    """The C++ compiler that `CXX` names, else the first usual one on the PATH.

    Raises:
        BuildFailed: there is none, or this is not Linux.
    """
    if sys.platform != "linux":
        raise BuildFailed(f"native kernels are built on Linux only, this is {sys.platform}")
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return Path(found)
    raise BuildFailed(f"no C++ compiler found (looked for {wanted or ', '.join(_COMPILERS)}); install g++")


def loaded_openmp() -> Path | None:
    """The OpenMP runtime this process has loaded (torch brings its own).

    Linking against this very file keeps one pool of threads for torch and the kernels; two runtimes would
    start twice the threads, and each would ignore the other's settings.
    """
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    return Path(found.group()) if found else None


def build_key(sources: Sequence[Path], compiler: Path, openmp: Path | None) -> str:
    """A name for the result of building `sources` (headers included) here."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(" ".join(FLAGS).encode() + str(openmp).encode() + _run([str(compiler), "--version"]))
    digest.update(_processor())
    return digest.hexdigest()


def build(sources: Sequence[Path], include: Path, compiler: Path, openmp: Path | None, target: Path) -> None:
    """Compile `sources` side by side and link them into `target`, which appears whole or not at all.

    Raises:
        BuildFailed: the compiler refused something or took too long.
        OSError: the folder of `target` cannot be written.
    """
    flags = [flag for flag in FLAGS if openmp or flag != "-fopenmp"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects = [Path(folder) / f"{index}.o" for index in range(len(sources))]
        compiles = [
            [str(compiler), *flags, "-I", str(include), "-c", str(source), "-o", str(result)]
            for source, result in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, compiles))
        linked = Path(folder) / "linked.so"
        runtime = [str(openmp)] if openmp else []
        _run([str(compiler), "-shared", *map(str, objects), *runtime, "-o", str(linked)])
        linked.rename(target)


@contextlib.contextmanager
def cache_folder() -> Generator[Path]:
    """`$XDG_CACHE_HOME/kvmesh`, or where that cannot be written a temporary folder while this lasts."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "kvmesh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError:
        with tempfile.TemporaryDirectory(prefix="kvmesh-") as temporary:
            yield Path(temporary)
    else:
        yield folder


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_STEP_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command)} failed: {done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout


def _processor() -> bytes:
    """What `-march=native` depends on."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    kept = ("model name", "flags", "Features", "CPU part", "cache size")
    return "\n".join(line for line in lines if line.startswith(kept)).encode()
