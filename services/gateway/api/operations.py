"""What operators ask: health, metrics, the mesh, the schema of this API."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from libs.telemetry.metrics import exposition
from services.gateway.api.body import json_response

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/metrics", "/openapi.json"})
"""Asked without a key: by load balancers, orchestrators, Prometheus."""


@dataclass(frozen=True)
class Readiness:
    """Whether requests can be served, why not, and by whom."""

    reasons: list[str]
    instances: list[dict[str, Any]]


class OperationsApi:
    """Endpoints that concern no model."""

    def __init__(
        self,
        registry: CollectorRegistry,
        openapi: bytes,
        *,
        readiness: Callable[[], Readiness],
        mesh: Callable[[], dict[str, Any]],
    ) -> None:
        self._registry, self._openapi = registry, openapi
        self._readiness, self._mesh = readiness, mesh

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/v1/mesh", self.mesh),
            Route("/live", self.live),
            Route("/ready", self.ready),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
        ]

    async def live(self, _request: Request) -> Response:
        """The loop turns."""
        return json_response({"status": "live"})

    async def ready(self, _request: Request) -> Response:
        """503 while no request could be served."""
        reasons = self._readiness().reasons
        status = {"status": "not ready" if reasons else "ready", "reasons": reasons}
        return json_response(status, 503 if reasons else 200)

    async def health(self, _request: Request) -> Response:
        """As `ready`, with the instances."""
        now = self._readiness()
        status = {"status": "unhealthy" if now.reasons else "healthy", "reasons": now.reasons}
        return json_response({**status, "instances": now.instances}, 503 if now.reasons else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus."""
        body, content_type = exposition(self._registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, _request: Request) -> Response:
        """The schema of this API."""
        return Response(self._openapi, media_type="application/json")

    async def mesh(self, _request: Request) -> Response:
        """Services, states, loads, rates."""
        return json_response(self._mesh())
