"""What an answer consists of, whichever endpoint writes it."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from libs.model.tokenizer import Tokenizer
from libs.request.outcome import FinishReason
from services.gateway.generation.text import ShownToken, TextDelta

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens, those whose KV was found."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Counts over all choices; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    text: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        """Append what one delta brought."""
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.finish = delta.finish or self.finish


class ResponseFormat(Protocol):
    """The documents of one endpoint. Chunks are JSON documents, without the framing of a stream."""

    def chunks(self, choice: int, delta: TextDelta, *, is_first: bool) -> list[bytes]:
        """What one delta of a choice becomes."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk: no choices."""
        ...

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The document of an answer that is not streamed."""
        ...


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


def chosen_logprob(token: ShownToken) -> float:
    """The log-probability of a token that is shown."""
    return 0.0 if token.logprobs is None else finite(token.logprobs.logprob)


def token_label(raw: bytes) -> str:
    """A token for people: its text, or its bytes where they are no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def shown_bytes(token: ShownToken, raw: bytes) -> bytes:
    """Its part of the answer's bytes: joined over all tokens they are the answer's UTF-8."""
    if token.is_cut:
        return token.text.encode()
    try:
        raw.decode()
    except UnicodeDecodeError:
        return raw
    return token.text.encode()


def top_tokens(token: ShownToken, tokenizer: Tokenizer) -> list[tuple[str, float, bytes]]:
    """The most likely tokens at its position: text, log-probability, bytes. Itself reads as it is shown."""
    if token.logprobs is None:
        return []
    top: list[tuple[str, float, bytes]] = []
    for token_id, logprob in zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=False):
        raw = tokenizer.token_bytes(token_id)
        if token_id == token.token_id:
            top.append((token.text, finite(logprob), shown_bytes(token, raw)))
        else:
            top.append((token_label(raw), finite(logprob), raw))
    return top
