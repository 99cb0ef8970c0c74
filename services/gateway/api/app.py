"""The ASGI app: paths, keys, and one shape for every error."""

import math
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.api.admin import AdminKey, is_admin_call
from services.gateway.api.errors import ApiError, Failed, NotFound, Unauthorized, encode_error
from services.gateway.api.operations import OperationsApi
from services.gateway.api.tenants import NOBODY, SCOPE_KEY, Tenant, Tenants
from services.gateway.generation.generation_api import GenerationApi
from services.gateway.mesh.mesh_page import PAGE_PATHS, MeshPage
from services.gateway.mesh.migrations_api import MigrationsApi
from services.gateway.metrics import GatewayMetrics

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/metrics", "/openapi.json"}) | PAGE_PATHS
"""Asked without a key: by load balancers, orchestrators, Prometheus, people."""


class MethodNotAllowed(ApiError):
    """The path exists, with other methods."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


def build_app(
    generation: GenerationApi,
    operations: OperationsApi,
    migrations: MigrationsApi,
    mesh_page: MeshPage,
    metrics: GatewayMetrics,
    *,
    api_keys: Sequence[str],
    admin_key: str,
) -> Starlette:
    """All paths of the gateway."""
    routes = [
        Route("/v1/chat/completions", generation.chat, methods=["POST"]),
        Route("/v1/completions", generation.completions, methods=["POST"]),
        Route("/tokenize", operations.tokenize, methods=["POST"]),
        Route("/detokenize", operations.detokenize, methods=["POST"]),
        Route("/v1/models", operations.models),
        Route("/v1/models/{model:path}", operations.model),
        Route("/v1/mesh", operations.mesh),
        *migrations.routes(),
        *mesh_page.routes(),
        Route("/live", operations.live),
        Route("/ready", operations.ready),
        Route("/health", operations.health),
        Route("/metrics", operations.metrics),
        Route("/openapi.json", operations.openapi),
    ]
    paths = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_CountedResponses, metrics=metrics, paths=paths),
            Middleware(_Keys, tenants=Tenants(api_keys), admin_key=AdminKey(admin_key)),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _nobody_there,
            Exception: _unexpected,
        },
    )
    app.router.redirect_slashes = False
    return app


class _Keys:
    """Lets requests through that show one of the keys; without keys, all. Says in the scope whose it is.

    Admin calls are let through by the admin key alone.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants, admin_key: AdminKey) -> None:
        self._app, self._tenants, self._admin_key = app, tenants, admin_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if is_admin_call(scope["method"], scope["path"]):
            self._admin_key.check(Request(scope))
        elif scope["path"] not in OPEN_PATHS:
            tenant = self._tenant_of(Request(scope)) if self._tenants.need_keys else NOBODY
            if tenant is None:
                raise Unauthorized("a valid API key is needed: send `Authorization: Bearer <key>`")
            scope[SCOPE_KEY] = tenant

    def _tenant_of(self, request: Request) -> Tenant | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        return self._tenants.find(key.strip().encode()) if scheme.lower() == "bearer" else None


class _CountedResponses:
    """Counts responses by path and status when they begin."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Any other path would let clients make labels without end.
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.http_requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP response of an error."""
    headers = dict(headers or {})
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(encode_error(error), error.status, headers, "application/json")


async def _api_error(_request: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, ApiError) else Failed(str(error)))


async def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(Failed(str(error)))
    what = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(NotFound(f"there is no {what}"))
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        return error_response(
            MethodNotAllowed(f"{what} is not allowed; use {allowed.get('Allow', '')}"), allowed
        )
    return error_response(Failed(error.detail))


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(_request: Request, _error: Exception) -> Response:
    return error_response(Failed("an unexpected error; it was logged"))
