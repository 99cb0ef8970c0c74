"""The folder where a mesh keeps its state on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path

ADMIN_KEY_FILE = "admin.key"
"""In it: the key of the gateway's admin calls, where `up` made one."""


def default_state_dir(environ: Mapping[str, str] = os.environ) -> str:
    """$XDG_STATE_HOME/kvmesh, or ~/.local/state/kvmesh."""
    return str(Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvmesh")
