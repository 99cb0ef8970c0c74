"""One worker as clients name it."""

from libs.bus.bus import Bus
from libs.bus.messages.presence import Presence
from libs.mesh.workers import find_worker
from libs.runtime.roster import Roster
from services.gateway.api.errors import NotFound
from services.gateway.mesh.refusals import broker_away


def worker_named(bus: Bus, roster: Roster, name: str, *, param: str, code: str) -> Presence:
    """By name or incarnation. Raises NotFound with `param` and `code`, Unavailable without a broker."""
    worker = find_worker(roster.all(), name)
    if worker is None and not bus.is_connected:
        raise broker_away(f"no worker {name!r} was known before")
    if worker is None:
        look = "GET /v1/mesh/placement (kvmesh placement)"
        raise NotFound(f"there is no worker {name!r}; {look} lists those there are", param=param, code=code)
    return worker
