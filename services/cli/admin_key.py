"""Where the admin key comes from: the flag, the variable, or the file that `kvmesh up` leaves."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from libs.runtime.state_dir import ADMIN_KEY_FILE, default_state_dir


def find_admin_key(given: str, url: str, environ: Mapping[str, str]) -> str:
    """Empty where there is none. The file's key is shown to gateways on this machine alone."""
    if given or (given := environ.get("KVMESH_ADMIN_KEY", "")):
        return given
    if not _is_on_this_machine(url):
        return ""
    try:
        folder = Path(environ.get("KVMESH_STATE_DIR") or default_state_dir(environ)).expanduser()
        return (folder / ADMIN_KEY_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _is_on_this_machine(url: str) -> bool:
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
