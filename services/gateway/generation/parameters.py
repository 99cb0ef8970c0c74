"""From a request's fields to its sequences' parameters; what cannot be served is refused by name. Pure."""

from typing import Any

import msgspec

from libs.request.sampling import SamplingParams
from services.gateway.api.errors import BadRequest, ContextTooLong
from services.gateway.generation.fields import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Unsupported,
)
from services.gateway.generation.model import check_token_id

DEFAULT_COMPLETION_TOKENS = 16
NUM_SEEDS = 2**63

_NOTHING_ASKED: tuple[Any, ...] = (None, [], {}, "", False, "none")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("auto",),
    "function_call": ("auto",),
}


def refuse_unsupported(fields: msgspec.Struct, prefix: str = "") -> None:
    """Raise BadRequest for the first field that is set and not served."""
    for field in msgspec.structs.fields(fields):
        value: Any = getattr(fields, field.name)
        if field.type != Unsupported or value is msgspec.UNSET:
            continue
        if _decoded(value) not in (*_NOTHING_ASKED, *_HARMLESS.get(field.name, ())):
            name = prefix + field.name
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")


def _decoded(raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (RecursionError, msgspec.DecodeError, UnicodeError):
        return raw


def check_chat(request: ChatRequest) -> None:
    """Raise BadRequest for what the schema cannot say."""
    refuse_unsupported(request)
    _check_stream(request)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    both = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(both) > 1:
        raise BadRequest("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")


def check_completion(request: CompletionRequest) -> None:
    """Raise BadRequest for what the schema cannot say."""
    refuse_unsupported(request)
    _check_stream(request)
    if request.best_of not in (None, num_choices(request)):
        raise BadRequest("best_of is served only where it equals n", param="best_of")
    if request.suffix:
        raise BadRequest("suffix is not supported", param="suffix", code="unsupported_parameter")
    if request.echo and request.logprobs is not None:
        raise BadRequest(
            "echo together with logprobs would need the log-probabilities of the prompt, which are not "
            "supported; drop one of them",
            param="echo",
        )


def _check_stream(request: GenerationFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options needs stream to be true", param="stream_options")


def message_texts(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Role and text of each message, as chat templates take them."""
    return [_message_text(message, f"messages[{at}].") for at, message in enumerate(messages)]


def _message_text(message: ChatMessage, where: str) -> dict[str, str]:
    refuse_unsupported(message, where)
    if message.role in ("tool", "function"):
        raise BadRequest(f"messages of role {message.role} are not supported", param=f"{where}role")
    role = "system" if message.role == "developer" else message.role
    if message.content is None:
        raise BadRequest("content is missing", param=f"{where}content")
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise BadRequest(
                f"content parts of type {part.type!r} are not supported, only text is"
                if part.type != "text"
                else "a content part of type 'text' needs its text",
                param=f"{where}content",
            )
    return {"role": role, "content": "\n".join(part.text or "" for part in message.content)}


def num_choices(fields: GenerationFields) -> int:
    """How many answers to each prompt."""
    return fields.n or 1


def stop_strings(fields: GenerationFields) -> tuple[str, ...]:
    """The stop strings, each once."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    return tuple(dict.fromkeys(stops))


def requested_tokens(fields: ChatRequest | CompletionRequest) -> int | None:
    """How many tokens the client asks for."""
    if isinstance(fields, ChatRequest):
        return fields.max_completion_tokens or fields.max_tokens
    return fields.max_tokens


def num_logprobs(fields: ChatRequest | CompletionRequest) -> int | None:
    """How many alternatives are given for each token; None: no log-probabilities at all."""
    if isinstance(fields, ChatRequest):
        return (fields.top_logprobs or 0) if fields.logprobs else None
    return fields.logprobs


def num_new_tokens(
    requested: int | None, default: int | None, *, num_prompt_tokens: int, max_model_len: int, param: str
) -> int:
    """How many tokens may be made: what is requested, at most what is left of the context.

    Raises ContextTooLong where the prompt leaves no room, BadRequest where the number could never be reached.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has "
            f"{num_prompt_tokens} and leaves no room for an answer",
            param=param,
        )
    if requested is not None and requested > max_model_len:
        raise BadRequest(
            f"max_tokens is {requested}, more than this model's context of {max_model_len} tokens",
            param="max_tokens",
        )
    return min(requested or default or num_left, num_left)


def sampling_params(
    fields: GenerationFields,
    *,
    requested_tokens: int | None,
    max_tokens: int,
    seed: int,
    logprobs: int | None,
    vocab_size: int,
) -> SamplingParams:
    """The parameters of one sequence. `seed` is its own, `max_tokens` fits the context."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > (requested_tokens or max_tokens):
        raise BadRequest(f"min_tokens is {min_tokens}, more than max_tokens", param="min_tokens")
    stop_token_ids = tuple(fields.stop_token_ids or ())
    for token_id in stop_token_ids:
        check_token_id(token_id, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        seed=seed % NUM_SEEDS,
        logprobs=logprobs,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(fields.ignore_eos),
    )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise BadRequest(f"{key!r} is not a token id", param="logit_bias")
        check_token_id(int(key), vocab_size, "logit_bias")
        if int(key) in biases:
            raise BadRequest(f"token id {int(key)} is given twice", param="logit_bias")
        biases[int(key)] = bias
    return biases


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
