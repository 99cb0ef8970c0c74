"""The live page at /mesh: its files, and the stream of events that it draws."""

import asyncio
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from services.gateway.api.serving import ClientGone, until_gone
from services.gateway.mesh.mesh_feed import MeshFeed
from services.gateway.metrics import GatewayMetrics

SLOW_SECONDS = 10.0
"""How long a viewer may take to read one snapshot."""
END_EVENT = b'event: end\ndata: {"reason":"this gateway is shutting down"}\n\n'

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {
    "/mesh": "page.html",
    "/mesh/page.css": "page.css",
    "/mesh/placement.css": "placement.css",
    "/mesh/page.js": "page.js",
    "/mesh/follow.js": "follow.js",
    "/mesh/memory.js": "memory.js",
    "/mesh/cards.js": "cards.js",
    "/mesh/workers.js": "workers.js",
    "/mesh/placement.js": "placement.js",
    "/mesh/moves.js": "moves.js",
}
PAGE_PATHS = frozenset(_FILES)
"""They tell nothing of the mesh, and ask for the key where one is needed."""
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class MeshPage:
    """`routes` of the page's files, and `events`."""

    def __init__(self, feed: MeshFeed, metrics: GatewayMetrics, slow_seconds: float = SLOW_SECONDS) -> None:
        self._feed, self._metrics, self._slow_seconds = feed, metrics, slow_seconds
        self._files = {path: _response(name) for path, name in _FILES.items()}

    def routes(self) -> list[Route]:
        """The page, and all that it is made of."""
        files = [Route(path, self.file) for path in self._files]
        return [*files, Route("/v1/mesh/events", self.events)]

    async def file(self, request: Request) -> Response:
        """One of the page's files."""
        return self._files[request.url.path]

    async def events(self, request: Request) -> Response:
        """Server-sent events: the whole of /v1/mesh each time."""
        if request.method == "HEAD":  # it has no body that could end
            return Response(media_type="text/event-stream")
        return MeshEvents(self._feed, self._metrics, self._slow_seconds)


class MeshEvents(Response):
    """One viewer's stream. Ends when the viewer goes, reads too slowly, or the gateway drains."""

    def __init__(self, feed: MeshFeed, metrics: GatewayMetrics, slow_seconds: float) -> None:
        self._feed, self._metrics, self._slow_seconds = feed, metrics, slow_seconds
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before anything was sent."""
        del scope
        with self._feed.viewer():
            try:
                await until_gone(receive, self._stream(send))
            except ClientGone:
                pass
            except TimeoutError:  # the connection is cut: there is no telling it to who does not read
                self._metrics.slow_clients.inc()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        number = 0
        while (came := await self._feed.after(number)) is not None:
            number, snapshot = came
            await self._send(send, b"data: %b\n\n" % snapshot, more=True)
        await self._send(send, END_EVENT, more=False)

    async def _send(self, send: Send, event: bytes, *, more: bool) -> None:
        async with asyncio.timeout(self._slow_seconds):
            await send({"type": "http.response.body", "body": event, "more_body": more})


def _response(name: str) -> Response:
    path = _FOLDER / name
    return Response(path.read_bytes(), headers=_HEADERS, media_type=_MEDIA_TYPES[path.suffix])
