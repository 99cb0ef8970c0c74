"""Where the admin key comes from: the flag, the variable, or the file that `kvmesh up` leaves."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

FILE_NAME = "admin.key"


def find_admin_key(given: str, url: str, environ: Mapping[str, str]) -> str:
    """Empty where there is none. The file's key is shown to gateways on this machine alone."""
    if given or (given := environ.get("KVMESH_ADMIN_KEY", "")):
        return given
    if not _is_on_this_machine(url):
        return ""
    try:
        return (_state_dir(environ) / FILE_NAME).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _state_dir(environ: Mapping[str, str]) -> Path:
    """As `kvmesh up` chooses it."""
    if folder := environ.get("KVMESH_STATE_DIR"):
        return Path(folder).expanduser()
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvmesh"


def _is_on_this_machine(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
