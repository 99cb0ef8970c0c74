"""One request to an OpenAI-compatible server, streamed; whatever happens ends up in its record."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.record import Record

MAX_DETAIL_CHARS = 300
_CONNECT_TIMEOUT_SECONDS = 30.0
_IDLE_SECONDS = 2.0
"""Many servers close idle connections after 5 s; one closed just as it is taken again loses a request."""


class ServerError(Exception):
    """The server cannot be asked at all; the text is for a person."""


@dataclass(frozen=True)
class ClientRules:
    """How requests are made. `api` is "chat" or "completions"."""

    url: str
    """With or without /v1 at its end."""
    api: str = "completions"
    model: str = ""
    temperature: float = 0.0
    timeout_seconds: float = 600.0
    """The longest silence of the server."""
    asks_usage: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)


class Client:
    """Opens as many connections as there are requests. `clock` gives seconds after the start of the test."""

    def __init__(
        self,
        rules: ClientRules,
        clock: Callable[[], float],
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._rules, self._clock = rules, clock
        self._url = rules.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._path = "/chat/completions" if rules.api == "chat" else "/completions"
        timeout = httpx.Timeout(rules.timeout_seconds, connect=_CONNECT_TIMEOUT_SECONDS, pool=None)
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS
        )
        self._http = httpx.AsyncClient(timeout=timeout, limits=limits, transport=transport)

    async def close(self) -> None:
        """Cuts what is still open."""
        await self._http.aclose()

    async def first_model(self, api_key: str = "") -> str:
        """The first model that the server lists. Raises ServerError."""
        try:
            answer = await self._http.get(self._url + "/models", headers=_authorization(api_key))
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self._url}/models names no model ({reason}); is the server up?") from error

    async def ask(
        self, asked: dict[str, Any], record: Record, *, api_key: str = "", session: str = ""
    ) -> str:
        """Send, read to the end, note all in `record`; returns the text. `asked` has messages or a prompt.

        Cancelling it ends the connection and marks the record.
        """
        body = {
            "model": self._rules.model,
            "temperature": self._rules.temperature,
            "stream": True,
            **({"stream_options": {"include_usage": True}} if self._rules.asks_usage else {}),
            **asked,
            **self._rules.extra_body,
        }
        headers = _authorization(api_key) | ({"x-session-id": session} if session else {})
        pieces: list[str] = []
        record.sent_seconds = self._clock()
        try:
            async with self._http.stream(
                "POST", self._url + self._path, json=body, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    record.error = f"http_{answer.status_code}"
                    record.detail = (await answer.aread())[:MAX_DETAIL_CHARS].decode(errors="replace")
                else:
                    await self._read(answer, record, pieces)
        except httpx.TimeoutException as error:
            record.error, record.detail = "timeout", type(error).__name__
        except httpx.ConnectError as error:
            record.error, record.detail = "unreachable", str(error)[:MAX_DETAIL_CHARS]
        except httpx.HTTPError as error:
            record.error, record.detail = "broken_off", repr(error)[:MAX_DETAIL_CHARS]
        except BaseException:
            record.was_cancelled = True
            raise
        finally:
            record.end_seconds = self._clock()
        return "".join(pieces)

    async def _read(self, answer: httpx.Response, record: Record, pieces: list[str]) -> None:
        async for event in events(answer.aiter_bytes()):
            if event == b"[DONE]":
                return
            try:
                piece = take(json.loads(event), record)
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                record.error, record.detail = "bad_answer", f"{error!r} in {event[:80]!r}"
                return
            if record.error:
                return
            if piece:
                record.token_seconds.append(self._clock())
                pieces.append(piece)
        record.error, record.detail = "broken_off", "the stream ended without [DONE]"


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event; events may be cut and joined anywhere on their way."""
    held = b""
    async for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def take(chunk: dict[str, Any], record: Record) -> str:
    """Note what one event says; returns its text."""
    if error := chunk.get("error"):
        record.error, record.detail = "error_event", json.dumps(error)[:MAX_DETAIL_CHARS]
        return ""
    if usage := chunk.get("usage"):
        record.num_prompt_tokens = usage.get("prompt_tokens")
        record.num_told_tokens = usage.get("completion_tokens")
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    text = ""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        # Servers that tell reasoning apart send it under names of their own; its tokens are tokens too.
        text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    return text


def _authorization(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
