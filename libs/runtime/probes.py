"""/live, /ready and /metrics of one process, for people, orchestrators and Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from libs.bus.messages.presence import Presence, ServiceState
from libs.telemetry.metrics import exposition


def probe_app(presence: Callable[[], Presence], registry: CollectorRegistry) -> Starlette:
    """`/live` says that the loop turns; `/ready` is 503 unless the state is ready."""

    async def live(_request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_request: Request) -> Response:
        now = presence()
        body = {
            "status": now.state.value,
            "name": now.name,
            "incarnation": now.incarnation,
            "detail": now.detail,
        }
        return JSONResponse(body, status_code=200 if now.state is ServiceState.READY else 503)

    async def metrics(request: Request) -> Response:
        body, content_type = exposition(registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Starlette(routes=[Route("/live", live), Route("/ready", ready), Route("/metrics", metrics)])
