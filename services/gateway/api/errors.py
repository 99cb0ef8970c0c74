"""What a client gets to see when something is wrong: one error, one status, one shape.

ApiError
 |- BadRequest (400) - ContextTooLong
 |- Unauthorized (401), Forbidden (403), NotFound (404), Conflict (409)
 |- TooLarge (413), WrongContentType (415)
 |- Overloaded (429), Failed (500), Unavailable (503), DeadlineOver (504)
"""

import math
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response


class ErrorBody(msgspec.Struct, frozen=True):
    """The fields of an error as OpenAI clients read them."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    epoch: int | UnsetType = UNSET
    """Of a refused move: the placement's now, where it is known."""


class ErrorDocument(msgspec.Struct, frozen=True):
    """The shape of every error, over HTTP and inside a stream."""

    error: ErrorBody


class ApiError(Exception):
    """The root of the errors that clients see; `retry_after_seconds` becomes a header."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.retry_after_seconds = message, param, retry_after_seconds
        self.code = code or self.code
        self.epoch: int | UnsetType = UNSET


class BadRequest(ApiError):
    """A parameter is wrong; `param` names it."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class ContextTooLong(BadRequest):
    """The prompt does not fit the model's context or any pool of the mesh."""

    code = "context_length_exceeded"


class Unauthorized(ApiError):
    """No API key, or a wrong one."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(ApiError):
    """Nobody may do this here, whichever key they show."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(ApiError):
    """No such model, or no such path."""

    status, type, code = 404, "invalid_request_error", "not_found"


class Conflict(ApiError):
    """What was asked for does not fit the state of things; `epoch` is the placement's now, -1 not known."""

    status, type, code = 409, "conflict_error", "conflict"

    def __init__(self, message: str, *, code: str, epoch: int = -1) -> None:
        super().__init__(message, code=code)
        self.epoch = UNSET if epoch < 0 else epoch


class RequestTimeout(ApiError):
    """The client was too slow in sending its request."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class TooLarge(ApiError):
    """The body or the message that it becomes is larger than a limit; the message names it."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class WrongContentType(ApiError):
    """The body is not JSON by its own word."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class Overloaded(ApiError):
    """Too much is running already; come back after `retry_after_seconds`."""

    status, type, code = 429, "overloaded_error", "overloaded"


class Failed(ApiError):
    """The request was begun and could not be ended."""

    status, type, code = 500, "server_error", "internal_error"


class Unavailable(ApiError):
    """Nobody is there to serve the request."""

    status, type, code = 503, "server_error", "service_unavailable"


class DeadlineOver(ApiError):
    """The request's time was over before its end."""

    status, type, code = 504, "timeout_error", "deadline_exceeded"


_encoder = msgspec.json.Encoder()


def encode_error(error: ApiError) -> bytes:
    """The JSON document of an error."""
    body = ErrorBody(error.message, error.type, error.param, error.code, error.epoch)
    return _encoder.encode(ErrorDocument(body))


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    """The HTTP response of an error."""
    headers = dict(headers or {})
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return Response(encode_error(error), error.status, headers, "application/json")
