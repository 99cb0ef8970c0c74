"""What operators and clients ask beside generation: health, models, the mesh, tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from libs.telemetry.metrics import exposition
from services.gateway.api.body import read_json
from services.gateway.api.errors import BadRequest
from services.gateway.api.openapi import openapi_document
from services.gateway.generation.language import Language
from services.gateway.generation.model_card import ServedModel
from services.gateway.generation.parameters import check_token_ids, message_texts
from services.gateway.generation.request_fields import DetokenizeRequest, TokenizeRequest

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


@dataclass(frozen=True)
class Readiness:
    """Whether requests can be served, why not, and by whom."""

    reasons: list[str]
    instances: list[dict[str, Any]]


class OperationsApi:
    """All endpoints that generate nothing."""

    def __init__(
        self,
        served: ServedModel,
        registry: CollectorRegistry,
        *,
        readiness: Callable[[], Readiness],
        mesh: Callable[[], dict[str, Any]],
        max_body_bytes: int,
    ) -> None:
        self._served, self._registry = served, registry
        self._readiness, self._mesh, self._max_body_bytes = readiness, mesh, max_body_bytes
        self._openapi = msgspec.json.encode(openapi_document())

    async def live(self, _request: Request) -> Response:
        """The loop turns."""
        return _json({"status": "live"})

    async def ready(self, _request: Request) -> Response:
        """503 while no request could be served."""
        reasons = self._readiness().reasons
        status = {"status": "not ready" if reasons else "ready", "reasons": reasons}
        return _json(status, 503 if reasons else 200)

    async def health(self, _request: Request) -> Response:
        """As `ready`, with the instances."""
        now = self._readiness()
        status = {"status": "unhealthy" if now.reasons else "healthy", "reasons": now.reasons}
        return _json({**status, "instances": now.instances}, 503 if now.reasons else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus."""
        body, content_type = exposition(self._registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def openapi(self, _request: Request) -> Response:
        """The schema of this API."""
        return Response(self._openapi, media_type="application/json")

    async def mesh(self, _request: Request) -> Response:
        """Services, states, loads, rates."""
        return _json(self._mesh())

    async def models(self, _request: Request) -> Response:
        """The names of the model."""
        cards = [self._served.card(name) for name in self._served.names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model"]
        self._served.check_name(name)
        return _json(self._served.card(name))

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text or of a chat."""
        asked = await read_json(request, _tokenize_decoder, max_bytes=self._max_body_bytes)
        tokens = await _tokens(asked, self._served.language_of(asked.model))
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._served.max_model_len()})

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        asked = await read_json(request, _detokenize_decoder, max_bytes=self._max_body_bytes)
        language = self._served.language_of(asked.model)
        check_token_ids(asked.tokens, language.vocab_size, "tokens")
        return _json({"prompt": await language.decode(asked.tokens)})


async def _tokens(asked: TokenizeRequest, language: Language) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if asked.messages is not None:
        return await language.encode_chat(
            message_texts(asked.messages), add_generation_prompt=asked.add_generation_prompt is not False
        )
    return await language.encode_text(
        asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False
    )


def _json(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status_code=status, media_type="application/json")
