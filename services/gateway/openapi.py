"""/openapi.json, made from the schemas that requests are read by and answers written from."""

from typing import Any

import msgspec

from services.gateway.api.errors import ErrorDocument
from services.gateway.generation.chat_format import ChatCompletion
from services.gateway.generation.completion_format import Completion
from services.gateway.generation.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from services.gateway.mesh.migration_fields import MigrationRequest
from services.gateway.mesh.roles_api import RoleRequest

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
    "/v1/mesh/placement": "Who runs which layers and holds which KV heads of each instance",
    "/v1/mesh/migrations": "Moves of layers, heads and blocks, under way and past",
    "/v1/mesh/migrations/{id}": "One move: its phase, bytes, pause, capacity before and after",
    "/v1/mesh/explain": "The last rounds of the coordinator's loop: what was considered, why it moved or not",
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


_ADMIN_ERRORS = {
    "401": "No valid admin key",
    "403": "This gateway has no admin key, so nobody may",
    "404": "No such worker, module or move",
    "409": "Stale epoch, busy, not ready, draining, or too late; `epoch` is the placement's now",
    "503": "A worker cannot be reached, or no coordinator leads that could explain; see Retry-After",
    "504": "The worker or the coordinator did not answer; what was asked for may have begun",
}


def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = [struct for _, asked, answer, _ in _POSTS.values() for struct in (asked, answer) if struct]
    _, components = msgspec.json.schema_components(
        [*structs, MigrationRequest, RoleRequest, ErrorDocument], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"get": _get(path, text)} for path, text in _GETS.items()}
    paths |= {path: {"post": _post(*facts)} for path, facts in _POSTS.items()}
    paths["/v1/mesh/migrations"]["post"] = _start_migration()
    paths["/v1/mesh/migrations/{id}"]["delete"] = _cancel_migration()
    paths["/v1/mesh/workers/{name}/role"] = {"post": _change_role()}
    security = {
        "key": {"type": "http", "scheme": "bearer"},
        "admin_key": {"type": "http", "scheme": "bearer"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvmesh", "version": "1", "description": "OpenAI-compatible generation by a mesh."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": security},
    }


def _get(path: str, text: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": text, "responses": {"200": {"description": "As said"}}}
    for name in ("model", "id"):
        if f"{{{name}}}" in path:
            operation["parameters"] = [_in_path(name)]
    if path == "/v1/mesh/explain":
        rounds = {"type": "integer", "minimum": 1, "maximum": 200, "default": 20}
        operation["parameters"] = [{"name": "rounds", "in": "query", "schema": rounds}]
    return operation


def _start_migration() -> dict[str, Any]:
    location = {"description": "Where it is told how the move goes on", "schema": {"type": "string"}}
    return {
        "summary": "Move layers, KV heads or blocks to another worker, or bring them home",
        "security": [{"admin_key": []}],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(MigrationRequest)}},
        },
        "responses": {
            "202": {"description": "It begins: `id` and `epoch`", "headers": {"Location": location}},
            **_errors({"400": _ERRORS["400"], **_ADMIN_ERRORS}),
        },
    }


def _cancel_migration() -> dict[str, Any]:
    return {
        "summary": "Roll a move back, if it has not switched",
        "security": [{"admin_key": []}],
        "parameters": [_in_path("id")],
        "responses": {"202": {"description": "It is rolled back"}, **_errors(_ADMIN_ERRORS)},
    }


def _change_role() -> dict[str, Any]:
    return {
        "summary": "Make a worker, by name or incarnation, a prefill worker, a decode worker, or both",
        "security": [{"admin_key": []}],
        "parameters": [_in_path("name")],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(RoleRequest)}},
        },
        "responses": {
            "202": {"description": "It ends its work, then has that role: /v1/mesh tells when it is ready"},
            **_errors({"400": _ERRORS["400"], **_ADMIN_ERRORS}),
        },
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _errors(meanings: dict[str, str]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(ErrorDocument)}}
    return {status: {"description": meaning, "content": content} for status, meaning in meanings.items()}


def _post(
    text: str, asked: type[msgspec.Struct], answer: type[msgspec.Struct] | None, streams: bool
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer) if answer else {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": text,
        "parameters": [_SESSION] if streams else [],
        "security": [{}, {"key": []}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(asked)}}},
        "responses": {"200": {"description": "The answer", "content": content}, **_errors(_ERRORS)},
    }


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
