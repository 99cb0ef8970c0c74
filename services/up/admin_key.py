"""The admin key of a mesh on this machine: made once, kept where its owner alone can read it."""

import os
import secrets
from pathlib import Path

from libs.runtime.state_dir import ADMIN_KEY_FILE
from services.up.preflight import NotStartable

VARIABLE = "KVMESH_ADMIN_KEY"

_NUM_BYTES = 32


def settle_admin_key(state_dir: Path, given: str) -> str:
    """The key that the gateway is to know: the one given, else that of the folder. Raises NotStartable.

    With one given nothing is kept: `kvmesh migrate` would show a key that is not it.
    """
    path = state_dir / ADMIN_KEY_FILE
    try:
        if given:
            path.unlink(missing_ok=True)
            return given
        return _read(path) or _make(path)
    except OSError as error:
        raise NotStartable(f"cannot keep the admin key in {path}: {error.strerror or error}") from error


def _read(path: Path) -> str:
    """Empty where there is none, or others could have read it."""
    try:
        with path.open(encoding="utf-8") as file:
            facts = os.fstat(file.fileno())
            if facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
                return ""
            return file.read().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _make(path: Path) -> str:
    key = secrets.token_urlsafe(_NUM_BYTES)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    fresh.replace(path)
    return key
