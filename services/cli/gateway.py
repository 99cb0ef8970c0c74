"""The gateway's API as a terminal needs it."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

_CONNECT_TIMEOUT_SECONDS = 5.0
_ANSWER_TIMEOUT_SECONDS = 600.0


class GatewayError(Exception):
    """The gateway is not there, refused, or broke off; the text is one line for a person."""


@dataclass(frozen=True)
class ChatRequest:
    """What is asked; None leaves a parameter to the gateway."""

    messages: Sequence[dict[str, str]]
    model: str = ""
    """Empty: the first that the gateway serves."""
    max_tokens: int | None = None
    temperature: float | None = None


@dataclass
class Answer:
    """What came, filled while it streams."""

    model: str = ""
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_text_seconds: float | None = None
    """Until the first text, from sending the request."""
    total_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None for answers too short to say."""
        num_tokens = int(self.usage.get("completion_tokens", 0))
        if self.first_text_seconds is None or num_tokens < 2:
            return None
        spent_seconds = self.total_seconds - self.first_text_seconds
        return (num_tokens - 1) / spent_seconds if spent_seconds > 0 else None


class Gateway:
    """A connection to one gateway. Every method raises GatewayError."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        transport: httpx.BaseTransport | None = None,
        *,
        admin_key: str = "",
    ) -> None:
        self._url = url.rstrip("/")
        self._admin_headers = _bearer(admin_key)
        timeout = httpx.Timeout(_ANSWER_TIMEOUT_SECONDS, connect=_CONNECT_TIMEOUT_SECONDS)
        self._client = httpx.Client(timeout=timeout, headers=_bearer(api_key), transport=transport)

    def close(self) -> None:
        """Idempotent."""
        self._client.close()

    def mesh(self) -> dict[str, Any]:
        """GET /v1/mesh: {"services": [...]}."""
        return self._get("/v1/mesh")

    def placement(self) -> dict[str, Any]:
        """GET /v1/mesh/placement: {"instances": [...]}."""
        return self._get("/v1/mesh/placement")

    def explain(self, num_rounds: int) -> dict[str, Any]:
        """GET /v1/mesh/explain: {"rounds": [...]}, the newest first."""
        return self._get(f"/v1/mesh/explain?rounds={num_rounds}")

    def migrations(self) -> dict[str, Any]:
        """GET /v1/mesh/migrations: {"data": [...]}, the newest first."""
        return self._get("/v1/mesh/migrations")

    def migration(self, move_id: str) -> dict[str, Any]:
        """One of them."""
        return self._get(_move_path(move_id))

    def start_migration(self, asked: dict[str, Any]) -> dict[str, Any]:
        """POST /v1/mesh/migrations, with the admin key: {"id": ..., "epoch": ...}."""
        return self._call("POST", "/v1/mesh/migrations", headers=self._admin_headers, json=asked)

    def cancel_migration(self, move_id: str) -> dict[str, Any]:
        """Roll a move back, with the admin key."""
        return self._call("DELETE", _move_path(move_id), headers=self._admin_headers)

    def change_role(self, worker: str, role: str) -> dict[str, Any]:
        """POST /v1/mesh/workers/{name}/role, with the admin key: {"name": ..., "incarnation": ...}."""
        path = f"/v1/mesh/workers/{quote(worker, safe='')}/role"
        return self._call("POST", path, headers=self._admin_headers, json={"role": role})

    def first_model(self) -> str:
        """The name of the first model that is served."""
        models = self._get("/v1/models").get("data") or []
        if not models:
            raise GatewayError(f"{self._url} serves no model yet")
        return str(models[0]["id"])

    def chat(self, request: ChatRequest, answer: Answer) -> Iterator[str]:
        """Pieces of text as they come; `answer` is complete when the iterator ends."""
        answer.model = request.model or self.first_model()
        body: dict[str, Any] = {
            "model": answer.model,
            "messages": list(request.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        if request.temperature is not None:
            body["temperature"] = request.temperature
        begun = time.monotonic()
        for chunk in self._events("/v1/chat/completions", body):
            if piece := _take(chunk, answer):
                if answer.first_text_seconds is None:
                    answer.first_text_seconds = time.monotonic() - begun
                yield piece
        answer.total_seconds = time.monotonic() - begun

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self._client.stream("POST", self._url + path, json=body) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield _parsed(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise GatewayError("the answer broke off in the middle")

    def _get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, self._url + path, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise _refusal(response)
        return _parsed(response.text)

    def _unreachable(self, error: Exception) -> GatewayError:
        if isinstance(error, httpx.ConnectError):
            return GatewayError(
                f"no gateway at {self._url} ({error}); start one with `kvmesh up`, or give --url"
            )
        return GatewayError(f"{self._url}: {str(error) or type(error).__name__}")


def _bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()} if key else {}


def _move_path(move_id: str) -> str:
    return f"/v1/mesh/migrations/{quote(move_id, safe='')}"


def _take(chunk: dict[str, Any], answer: Answer) -> str:
    """Put one chunk into `answer`; returns its text."""
    if error := chunk.get("error"):
        raise GatewayError(str(error.get("message", error)))
    answer.usage = chunk.get("usage") or answer.usage
    piece = ""
    for choice in chunk.get("choices", []):
        piece += choice.get("delta", {}).get("content") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text += piece
    return piece


def _parsed(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise GatewayError(f"this is no answer of a gateway: {text[:80]!r}") from error
    if not isinstance(parsed, dict):
        raise GatewayError(f"this is no answer of a gateway: {text[:80]!r}")
    return parsed


def _refusal(response: httpx.Response) -> GatewayError:
    try:
        error = response.json()["error"]
        said, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        said, code = response.text[:200].strip() or response.reason_phrase, None
    if code == "invalid_admin_key":
        said = (
            "the admin key is needed: --admin-key or $KVMESH_ADMIN_KEY (`kvmesh up` keeps it in admin.key of "
            "its state folder, where it is found if $KVMESH_STATE_DIR names the folder)"
        )
    if code == "invalid_api_key":
        said = "this gateway has API keys, and one is needed: --api-key or $KVMESH_API_KEY"
    return GatewayError(f"{said} (HTTP {response.status_code})")
