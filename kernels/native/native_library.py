"""The compiled kernels as a ctypes library, or the news that there are none."""

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import torch

from kernels.native.build import (
    BuildFailed,
    build,
    build_key,
    cache_folder,
    find_compiler,
    loaded_openmp,
)

_PACKAGE = Path(__file__).parent.parent
_ARGUMENT_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int,
    "l": ctypes.c_int64,
    "f": ctypes.c_float,
}
IS_FLOAT32 = {torch.float32: 1, torch.bfloat16: 0}
"""The dtypes that the kernels know, as they are told."""

_log = structlog.get_logger()


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The library, built on the first call of the first process (seconds), or None where it cannot be.

    Torch is imported first, so that its OpenMP runtime is the one that the library finds. The reason for
    a None is logged once; callers then use torch.
    """
    try:
        return _load()
    except (BuildFailed, OSError) as error:
        _log.warning("native_kernels_unavailable", reason=str(error), instead="torch")
        return None


def kernel_sources() -> list[Path]:
    """All C++ files of this package, headers too, in a fixed order."""
    return sorted([*_PACKAGE.glob("*/*.cpp"), *_PACKAGE.glob("*/*.h")])


def bind(library: ctypes.CDLL, name: str, signature: str, *, counts: bool = False) -> Callable[..., Any]:
    """A function of the library with its argument types set, so that a call converts without asking.

    `signature` has one letter for each argument: p pointer (an address, or None), i int, l int64, f float.
    The call releases the GIL. It returns nothing, or, where it `counts`, an int64.
    """
    function = library[name]
    function.argtypes = [_ARGUMENT_TYPES[letter] for letter in signature]
    function.restype = ctypes.c_int64 if counts else None
    return function


num_threads: Callable[[], int] = torch.get_num_threads
"""Threads for one kernel call: torch's setting for the calling thread."""


def _load() -> ctypes.CDLL:
    compiler, openmp, sources = find_compiler(), loaded_openmp(), kernel_sources()
    with cache_folder() as folder:
        target = folder / f"kernels-{build_key(sources, compiler, openmp)}.so"
        if target.exists():
            try:
                return ctypes.CDLL(str(target))
            except OSError:  # cut short by a full disk or a crash: make it again
                target.unlink(missing_ok=True)
        started = time.monotonic()
        build(
            [source for source in sources if source.suffix == ".cpp"],
            Path(__file__).parent,
            compiler,
            openmp,
            target,
        )
        seconds = round(time.monotonic() - started, 1)
        _log.info("native_kernels_built", compiler=str(compiler), seconds=seconds, library=str(target))
        return ctypes.CDLL(str(target))
