"""What clients may send. The schema IS the validation: msgspec keeps the bounds."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from libs.request.sampling import MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024

Ignored = Annotated[msgspec.Raw | UnsetType, Meta(description="accepted, without effect")]
"""It does not change what the answer means."""
Unsupported = Annotated[msgspec.Raw | UnsetType, Meta(description="refused unless it asks for nothing")]
"""Known, but not served: refused by name unless it is null, empty or a default."""

TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
SmallName = Annotated[str, Meta(max_length=256)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """With `include_usage` the last chunk before `[DONE]` carries the usage and no choices."""

    include_usage: bool = False


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a chat and of a completion request. Unknown fields are refused by name."""

    model: SmallName
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    """0 and -1 keep every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cache_salt: SmallName | None = None
    """Requests share cached KV only with requests of the same salt, and of the same API key."""
    session_id: str | None = None
    """What the client calls the conversation, for routing; the header x-session-id goes before it."""
    prompt_cache_key: str | None = None
    """Taken for the session where there is no other name for it."""
    add_special_tokens: bool | None = None

    user: Ignored = UNSET
    metadata: Ignored = UNSET
    store: Ignored = UNSET
    service_tier: Ignored = UNSET
    safety_identifier: Ignored = UNSET
    prompt_cache_retention: Ignored = UNSET


class TextPart(msgspec.Struct, frozen=True):
    """One part of a message. Only `type: text` is served; others are refused by their name."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_calls: Unsupported = UNSET
    function_call: Unsupported = UNSET
    audio: Unsupported = UNSET


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    add_generation_prompt: bool | None = None

    reasoning_effort: Ignored = UNSET
    verbosity: Ignored = UNSET
    prediction: Ignored = UNSET
    parallel_tool_calls: Ignored = UNSET
    tools: Unsupported = UNSET
    tool_choice: Unsupported = UNSET
    functions: Unsupported = UNSET
    function_call: Unsupported = UNSET
    response_format: Unsupported = UNSET
    audio: Unsupported = UNSET
    modalities: Unsupported = UNSET
    web_search_options: Unsupported = UNSET


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """A text, a list of token ids, or a list of either."""
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either `prompt` or `messages`."""

    model: SmallName | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: SmallName | None = None
    tokens: list[TokenId]
