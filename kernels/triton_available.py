"""Whether Triton can be used, told once."""

import functools
import importlib.util

import structlog

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""A product and its sum are rounded once, as by the CPU kernels. It is said, because what Triton does unasked
changes with its version."""

_log = structlog.get_logger()


@functools.cache
def has_triton() -> bool:
    """Whether the Triton kernels can be imported; where not, one log line says that torch does their work."""
    found = importlib.util.find_spec("triton") is not None
    if not found:
        _log.warning("triton_kernels_unavailable", reason="triton is not installed", instead="torch")
    return found
