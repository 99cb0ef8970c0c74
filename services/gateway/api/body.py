"""JSON in and out: bodies are read within bounds; whatever is wrong with one becomes a 4xx that names it."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api.errors import BadRequest, RequestTimeout, TooLarge, WrongContentType

T = TypeVar("T")

READ_TIMEOUT_SECONDS = 60.0

_WHERE = re.compile(r"^(?P<what>.*) - at `(?:key in )?\$(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")


async def read_json(request: Request, decoder: msgspec.json.Decoder[T], *, max_bytes: int) -> T:
    """The typed body. Raises BadRequest, RequestTimeout, TooLarge, WrongContentType, or ClientDisconnect."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise WrongContentType(f"the body must be application/json, not {content_type or 'nothing'}")
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {READ_TIMEOUT_SECONDS:g} seconds") from None
    return decode_json(body, decoder)


async def _read(request: Request, max_bytes: int) -> bytes:
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The typed document. Raises BadRequest with the parameter that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _named(text: str) -> BadRequest:
    what, path = text, ""
    if where := _WHERE.match(text):
        what, path = where["what"], where["path"].lstrip(".")
    for pattern in (_UNKNOWN, _MISSING):
        if found := pattern.match(what):
            path = f"{path}.{found['name']}" if path else found["name"]
            words = "is not known" if pattern is _UNKNOWN else "is missing"
            code = "unknown_parameter" if pattern is _UNKNOWN else "missing_required_parameter"
            return BadRequest(f"{path} {words}", param=path, code=code)
    return BadRequest(f"{path}: {what}" if path else what, param=path or None)


def json_response(document: object, status: int = 200) -> Response:
    """A document as it is answered."""
    return Response(msgspec.json.encode(document), status_code=status, media_type="application/json")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {max_bytes} bytes (--max-body-bytes)")
