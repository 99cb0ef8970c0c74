"""The embedded message broker: the nats-server that the Python environment brings along, on loopback only."""

from dataclasses import dataclass
from pathlib import Path

from libs.bus.nats_server import BrokerNotStarted, nats_server_command
from services.up.mesh import Program
from services.up.plan import BROKER, BROKER_STAGE
from services.up.preflight import NotStartable, check_port

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Broker:
    """What to run, and where it will be. Port and store stay the same over its restarts."""

    program: Program
    url: str


def plan_broker(store_dir: Path) -> Broker:
    """A broker on a free port that keeps its streams in `store_dir`. Raises NotStartable."""
    port = check_port(_HOST, 0)
    try:
        command = nats_server_command(store_dir, host=_HOST, port=port)
    except BrokerNotStarted as error:
        raise NotStartable(str(error)) from error
    return Broker(Program(BROKER, command, BROKER_STAGE), f"nats://{_HOST}:{port}")
