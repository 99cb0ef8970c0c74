"""/openapi.json, made from the schemas that requests are read by and answers written from."""

from typing import Any

import msgspec

from services.gateway.chat_answer import ChatCompletion
from services.gateway.completion_answer import Completion
from services.gateway.errors import ErrorDocument
from services.gateway.request_fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_POSTS: dict[str, tuple[str, type[msgspec.Struct], type[msgspec.Struct] | None, bool]] = {
    "/v1/chat/completions": ("Answer a conversation", ChatRequest, ChatCompletion, True),
    "/v1/completions": ("Continue one or several prompts", CompletionRequest, Completion, True),
    "/tokenize": ("Tokens of a text or a conversation", TokenizeRequest, None, False),
    "/detokenize": ("The text of tokens", DetokenizeRequest, None, False),
}
_GETS = {
    "/v1/models": "The models served",
    "/v1/models/{model}": "One model",
    "/v1/mesh": "Services, states, loads and rates of the mesh",
    "/v1/mesh/events": "The same as server-sent events, once a second and at every change",
    "/mesh": "The mesh as a page, live",
    "/live": "Whether the process lives",
    "/ready": "Whether requests can be served; 503 if not",
    "/health": "As /ready, with the instances and reasons",
    "/metrics": "Prometheus metrics",
}
_ERRORS = {
    "400": "A parameter is wrong",
    "401": "No valid API key",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too much is in progress; see Retry-After",
    "503": "No worker can take the request; see Retry-After",
    "504": "The request's deadline passed",
}


_SESSION = {
    "name": "x-session-id",
    "in": "header",
    "description": "What the client calls the conversation; goes before session_id and prompt_cache_key",
    "schema": {"type": "string"},
}


def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = [struct for _, asked, answer, _ in _POSTS.values() for struct in (asked, answer) if struct]
    _, components = msgspec.json.schema_components(
        [*structs, ErrorDocument], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _get(path, text)} for path, text in _GETS.items()}
    paths |= {path: {"post": _post(*facts)} for path, facts in _POSTS.items()}
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": "1", "description": "OpenAI-compatible generation by a mesh."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
    }


def _get(path: str, text: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": text, "responses": {"200": {"description": "As said"}}}
    if "{model}" in path:
        name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [name]
    return operation


def _post(
    text: str, asked: type[msgspec.Struct], answer: type[msgspec.Struct] | None, streams: bool
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer) if answer else {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    errors = {
        status: {"description": meaning, "content": {"application/json": {"schema": _ref(ErrorDocument)}}}
        for status, meaning in _ERRORS.items()
    }
    return {
        "summary": text,
        "parameters": [_SESSION] if streams else [],
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
        "responses": {"200": {"description": "The answer", "content": content}, **errors},
    }


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
