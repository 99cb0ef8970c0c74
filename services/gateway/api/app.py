"""The ASGI app: paths, keys, and one shape for every error."""

from collections.abc import Sequence

from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.api.auth import AdminKey, Authentication, Tenants
from services.gateway.api.errors import ApiError, Failed, NotFound, error_response


class MethodNotAllowed(ApiError):
    """The path exists, with other methods."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


def build_app(
    routes: Sequence[Route],
    responses: Counter,
    *,
    api_keys: Sequence[str],
    admin_key: str,
    open_paths: frozenset[str],
) -> Starlette:
    """All `routes`. `responses` counts by path and status; `open_paths` need no API key."""
    paths = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(_CountedResponses, responses=responses, paths=paths),
            Middleware(
                Authentication,
                tenants=Tenants(api_keys),
                admin_key=AdminKey(admin_key),
                open_paths=open_paths,
            ),
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


class _CountedResponses:
    """Counts responses by path and status when they begin."""

    def __init__(self, app: ASGIApp, responses: Counter, paths: frozenset[str]) -> None:
        self._app, self._responses, self._paths = app, responses, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Any other path would let clients make labels without end.
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._responses.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


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
