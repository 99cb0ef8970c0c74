"""What this gateway knows of the mesh: who is there, how loaded, whether a request could be served. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.mesh.cluster_state import Loads
from libs.mesh.workers import WORKERS


def model_filter(services: Sequence[Presence], model: str) -> str:
    """What to ask the router for: `model` where workers go by that name, else empty, which means any."""
    return model if any(p.kind in WORKERS and p.model == model for p in services) else ""


def serving(services: Sequence[Presence], model: str) -> list[Presence]:
    """Services without the workers of other models; `model` empty: all."""
    return [p for p in services if p.kind not in WORKERS or not model or p.model == model]


def obstacles(services: Sequence[Presence]) -> list[str]:
    """Why no request can be served now; empty when one can."""
    decodes = _ready(services, ServiceKind.DECODE_WORKER)
    prefills = _ready(services, ServiceKind.PREFILL_WORKER)
    fingerprints = {prefill.model_fingerprint for prefill in prefills}
    if any(decode.runs_prompts or decode.model_fingerprint in fingerprints for decode in decodes):
        return [] if _ready(services, ServiceKind.ROUTER) else ["no router is ready"]
    reasons = _not_ready(services)
    if not decodes:
        reasons.append("no decode worker is ready")
    if not prefills:
        reasons.append("no prefill worker is ready")
    if decodes and prefills:
        reasons.append("no prefill and decode worker have the same model, dtype and block layout")
    return reasons


def shortest_context(services: Iterable[Presence]) -> int | None:
    """The least context length that a ready worker tells; None while none tells."""
    ready = [p for p in services if p.kind in WORKERS and p.state is ServiceState.READY]
    return min((p.max_model_len for p in ready if p.max_model_len), default=None)


def instances(services: Sequence[Presence]) -> list[dict[str, Any]]:
    """Workers with their states, for /health."""
    return [
        {
            "name": p.name,
            "kind": p.kind.value,
            "incarnation": p.incarnation,
            "state": p.state.value,
            "reason": p.detail,
        }
        for p in services
        if p.kind in WORKERS
    ]


def mesh_status(services: Sequence[Presence], loads: Loads, now: float) -> dict[str, Any]:
    """All services with their loads, and sums over the workers; for /v1/mesh."""
    told: list[dict[str, Any]] = []
    totals: dict[str, float] = dict.fromkeys(_SUMMED, 0)
    for presence in sorted(services, key=lambda p: (p.kind.value, p.name)):
        entry: dict[str, Any] = msgspec.to_builtins(presence)
        entry |= {"load": None, "load_age_seconds": None}
        if (heard := loads.get(presence.incarnation)) is not None:
            entry |= {"load": _load(heard.message.load), "load_age_seconds": round(now - heard.at, 3)}
            # Blocks of the store are content, not what requests hold.
            for name in _SUMMED if presence.kind in WORKERS else ():
                totals[name] += getattr(heard.message.load, name)
        told.append(entry)
    return {"services": told, "totals": totals}


_SUMMED = (
    "num_running",
    "num_waiting",
    "num_reserved",
    "num_waiting_tokens",
    "num_blocks",
    "num_used_blocks",
    "tokens_per_second",
)


def _load(load: WorkerLoad) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.to_builtins(load)
    for name in ("recent_request_ids", "ended_request_ids"):
        told.pop(name, None)
    if not load.tiers:
        del told["tiers"]  # of stores alone
    return told


def _ready(services: Sequence[Presence], kind: ServiceKind) -> list[Presence]:
    return [p for p in services if p.kind is kind and p.state is ServiceState.READY]


def _not_ready(services: Sequence[Presence]) -> list[str]:
    return [
        f"{p.name} is {p.state.value}" + (f": {p.detail}" if p.detail else "")
        for p in services
        if p.kind is not ServiceKind.GATEWAY and p.state is not ServiceState.READY
    ]
