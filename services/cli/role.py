"""kvmesh role: change what a worker does, in place."""

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

from services.cli.gateway import Gateway, GatewayError

_LOOK_SECONDS = 0.1


def change_role(
    gateway: Gateway,
    worker: str,
    role: str,
    *,
    waits: bool,
    as_json: bool,
    out: TextIO,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Order it and, where `waits`, return when the worker is ready in that role. Raises GatewayError."""
    begun = time.monotonic()
    accepted = gateway.change_role(worker, role)
    while waits and not _is_ready(_service(gateway, accepted), role):
        pause(_LOOK_SECONDS)
    seconds = f" after {time.monotonic() - begun:.1f} s" if waits else ""
    said = f"has the role {role}{seconds}" if waits else f"ends its work, then has the role {role}"
    out.write((json.dumps(accepted) if as_json else f"{accepted['name']} {said}") + "\n")


def role_of(service: dict[str, Any]) -> str:
    """`prefill`, `decode` or `both` of a worker as GET /v1/mesh tells it; empty of any other service."""
    kind = str(service.get("kind", ""))
    if not kind.endswith("_worker"):
        return ""
    return "both" if service.get("runs_prompts") else kind.removesuffix("_worker")


def _service(gateway: Gateway, accepted: dict[str, Any]) -> dict[str, Any]:
    for service in gateway.mesh()["services"]:
        if service["incarnation"] == accepted["incarnation"]:
            found: dict[str, Any] = service
            return found
    raise GatewayError(f"{accepted['name']} has left the mesh before it had the role {accepted['role']}")


def _is_ready(service: dict[str, Any], role: str) -> bool:
    return service["state"] == "ready" and role_of(service) == role
