"""What `up` is to start: pure, from its settings and what each service would read."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.bus.messages.presence import ServiceKind
from services.up.settings import UpSettings

BROKER = "nats"

_STAGE = {
    ServiceKind.GATEWAY: 0,
    ServiceKind.PREFILL_WORKER: 1,
    ServiceKind.DECODE_WORKER: 1,
    ServiceKind.KV_STORE: 2,
    ServiceKind.ROUTER: 2,
    ServiceKind.MIGRATION_COORDINATOR: 2,
}
BROKER_STAGE = 3


@dataclass(frozen=True)
class Child:
    """One program to run. The lowest `stage` is drained first, each after the one before has ended."""

    name: str
    kind: ServiceKind
    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Its own alone, on top of what all get."""

    @property
    def stage(self) -> int:
        """Gateway, then workers, then the others: nobody loses what it needs to end its work."""
        return _STAGE[self.kind]


def plan_children(settings: UpSettings, *, port: int) -> list[Child]:
    """The mesh in order of start; `port` is the gateway's."""
    decode_flags = () if settings.prefill else ("--role", "both")
    return [
        Child("gateway", ServiceKind.GATEWAY, ("--host", settings.host, "--port", str(port))),
        *(Child(f"router-{i}", ServiceKind.ROUTER) for i in range(settings.routers)),
        *(Child(f"coordinator-{i}", ServiceKind.MIGRATION_COORDINATOR) for i in range(settings.coordinators)),
        *(Child(f"store-{i}", ServiceKind.KV_STORE) for i in range(settings.stores)),
        *(Child(f"prefill-{i}", ServiceKind.PREFILL_WORKER) for i in range(settings.prefill)),
        *(Child(f"decode-{i}", ServiceKind.DECODE_WORKER, decode_flags) for i in range(settings.decode)),
    ]


def share_threads(num_cores: int, num_workers: int) -> int:
    """CPU threads of each worker: two busy processes with all cores each slow each other many times over."""
    return max(1, num_cores // max(1, num_workers))


def children_environment(
    settings: UpSettings,
    environ: Mapping[str, str],
    passed_on: Mapping[str, str],
    *,
    secret: str,
) -> dict[str, str]:
    """What all children get on top of this process's own variables. A secret that is set already stays."""
    return {
        "KVMESH_LINK_SECRET": environ.get("KVMESH_LINK_SECRET") or secret,
        **passed_on,
        "KVMESH_MODEL": settings.model,
        "KVMESH_STATE_DIR": settings.state_dir,
        "KVMESH_DRAIN_TIMEOUT_SECONDS": str(settings.drain_timeout_seconds),
    }
