"""The two generating endpoints: a request is read, its sequences run, and their text goes out as it comes."""

import secrets
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from libs.telemetry.traces import start_span, traceparent_of
from services.gateway.api.auth import ANONYMOUS, SCOPE_KEY
from services.gateway.api.serving import ClientGone, ConcurrencyLimit
from services.gateway.generation.requests import RequestReader
from services.gateway.generation.sequence import Sequence
from services.gateway.generation.stream import ResponseStream

Read = Callable[[Request, str, str], Awaitable[list[Sequence]]]
Stream = Callable[[list[Sequence]], ResponseStream]


class GenerationEndpoint:
    """An ASGI app, because it answers by its own means and is in progress until the last byte is out."""

    def __init__(self, read: Read, prefix: str, stream: Stream, limit: ConcurrencyLimit) -> None:
        self._read, self._prefix, self._stream, self._limit = read, prefix, stream, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError before anything was sent."""
        http = Request(scope, receive)
        answer_id = f"{self._prefix}-{secrets.token_hex(12)}"
        traceparent = http.headers.get("traceparent", "")
        with self._limit, start_span("gateway.request", traceparent, request_id=answer_id) as span:
            if tenant := scope.get(SCOPE_KEY, ANONYMOUS).name:
                span.set_attribute("tenant", tenant)
            try:
                sequences = await self._read(http, answer_id, traceparent_of(span))
                await self._stream(sequences).run(receive, send)
            except (ClientDisconnect, ClientGone):
                span.set_attribute("client_gone", True)


def generation_routes(reader: RequestReader, stream: Stream, limit: ConcurrencyLimit) -> list[Route]:
    """POST /v1/chat/completions and /v1/completions."""
    chat = GenerationEndpoint(reader.chat, "chatcmpl", stream, limit)
    completion = GenerationEndpoint(reader.completion, "cmpl", stream, limit)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
    ]
