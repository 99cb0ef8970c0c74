"""The endpoints about the model that generate nothing: its names, texts to tokens and back."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.api.body import json_response, read_json
from services.gateway.api.errors import BadRequest
from services.gateway.generation.fields import DetokenizeRequest, TokenizeRequest
from services.gateway.generation.model import ServedModel, TextCodec, check_token_ids
from services.gateway.generation.parameters import message_texts

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


class ModelApi:
    """GET /v1/models, POST /tokenize and /detokenize."""

    def __init__(self, served: ServedModel, *, max_body_bytes: int) -> None:
        self._served, self._max_body_bytes = served, max_body_bytes

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, _request: Request) -> Response:
        """The names of the model."""
        cards = [self._served.card(name) for name in self._served.names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One of them."""
        name = request.path_params["model"]
        self._served.check_name(name)
        return json_response(self._served.card(name))

    async def tokenize(self, request: Request) -> Response:
        """Tokens of a text or of a chat."""
        asked = await read_json(request, _tokenize_decoder, max_bytes=self._max_body_bytes)
        tokens = await _tokens(asked, self._served.codec_of(asked.model))
        return json_response(
            {"tokens": tokens, "count": len(tokens), "max_model_len": self._served.max_model_len()}
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        asked = await read_json(request, _detokenize_decoder, max_bytes=self._max_body_bytes)
        codec = self._served.codec_of(asked.model)
        check_token_ids(asked.tokens, codec.vocab_size, "tokens")
        return json_response({"prompt": await codec.decode(asked.tokens)})


async def _tokens(asked: TokenizeRequest, codec: TextCodec) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise BadRequest("give either prompt or messages", param="prompt")
    if asked.messages is not None:
        return await codec.encode_chat(
            message_texts(asked.messages), add_generation_prompt=asked.add_generation_prompt is not False
        )
    return await codec.encode_text(
        asked.prompt or "", add_special_tokens=asked.add_special_tokens is not False
    )
