"""Finds libucp, loads it, and opens a context. `KVMESH_UCX_LIBRARY` decides: a path, `system` (the
distribution's, which may know InfiniBand and RoCE), or unset: the one in the wheel libucx-cu12, else the
system's."""

import ctypes
import ctypes.util
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from libs.transport.port import ListenFailed
from libs.transport.ucx import abi

LIBRARY_VARIABLE = "KVMESH_UCX_LIBRARY"

# UCX reads its environment while it is loaded and when it is configured; what the user set stands.
_DEFAULTS = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "fatal",  # faults of peers are reported by the Link, not on stdout
    "UCX_ERROR_SIGNALS": "",  # Python's own handlers stay
    "UCX_TLS": "^sm",  # shared memory cannot tell of a peer's death
    "UCX_TCP_TX_SEG_SIZE": "256K",  # 8K, the default, moves 1.0 GB/s instead of 4.5
    "UCX_TCP_RX_SEG_SIZE": "256K",
    # Over TCP a put writes to whatever address the peer names, also after the fetch was cancelled and the
    # buffer freed: that corrupts memory when a Link ends under a transfer.
    "UCX_TCP_PUT_ENABLE": "n",
}


class UcxUnavailable(ListenFailed):
    """No usable libucp; says which were tried."""


class Library:
    """libucp's functions, twice: `calls` keep the GIL (short calls), `bulk` release it (calls that move
    data)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls, self.bulk = _prototyped(ctypes.PyDLL(path)), _prototyped(ctypes.CDLL(path))
        self.version: str = self.calls.ucp_get_version_string().decode()

    def status_text(self, status: int) -> str:
        """UCX's words for a status."""
        text: bytes = self.calls.ucs_status_string(status)
        return f"{text.decode(errors='replace')} ({status})"

    def check(self, status: int, what: str) -> None:
        """Raise UcxUnavailable when a setup call failed."""
        if status != abi.OK:
            raise UcxUnavailable(
                f"UCX {self.version} at {self.path}: {what} failed: {self.status_text(status)}"
            )

    def open_context(self) -> int:
        """A ucp_context, set by UCX_* of the environment."""
        config, context = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.calls.ucp_config_read(None, None, ctypes.byref(config)), "ucp_config_read")
        params = abi.Params(field_mask=abi.PARAM_FEATURES, features=abi.FEATURE_AM | abi.FEATURE_WAKEUP)
        status = self.calls.ucp_init_version(
            *abi.API_VERSION, ctypes.byref(params), config, ctypes.byref(context)
        )
        self.calls.ucp_config_release(config)
        self.check(status, "ucp_init (is UCX_TLS or UCX_NET_DEVICES right?)")
        return context.value or 0


_loaded: dict[str, Library] = {}


def load_library() -> Library:
    """The libucp to use; loaded once per process. Raises UcxUnavailable."""
    asked = os.environ.get(LIBRARY_VARIABLE, "")
    if asked not in _loaded:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        _loaded[asked] = _load_first(_candidates(asked))
    return _loaded[asked]


def _candidates(asked: str) -> list[str]:
    system = ctypes.util.find_library("ucp") or "libucp.so.0"
    if asked == "system":
        return [system]
    if asked:
        return [asked]
    spec = importlib.util.find_spec("libucx")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return [str(Path(folder) / "lib" / "libucp.so.0") for folder in folders] + [system]


def _load_first(candidates: list[str]) -> Library:
    failures: list[str] = []
    for path in candidates:
        try:
            return Library(path)
        except (OSError, AttributeError) as error:
            failures.append(f"{path}: {error}")
    raise UcxUnavailable(
        f"no libucp (install libucx-cu12 or set {LIBRARY_VARIABLE}); tried: " + "; ".join(failures)
    )


def _prototyped(library: Any) -> Any:
    for name, (result, arguments) in abi.PROTOTYPES.items():
        function: Any = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def address_of(callback: Callable[..., Any]) -> int:
    """Address of a ctypes callback object, which the caller keeps alive."""
    address = ctypes.cast(callback, ctypes.c_void_p).value  # type: ignore[arg-type]  # ctypes function objects qualify
    return address or 0
