"""The documents of POST /v1/chat/completions."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from libs.model.tokenizer import Tokenizer
from services.gateway.generation.response import (
    Choice,
    Usage,
    chosen_logprob,
    shown_bytes,
    top_tokens,
)
from services.gateway.generation.text import ShownToken, TextDelta

_encode = msgspec.json.Encoder().encode


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens of a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token chosen, and what else was likely."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Of each token of the content."""

    content: list[TokenLogprob]


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """A chunk's part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatAnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One whole answer."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True):
    """An answer that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatFormat:
    """Writes the answer to one chat request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        answer_id: str,
        created: int,
        model: str,
        with_logprobs: bool,
        with_usage: bool,
    ) -> None:
        self._tokenizer, self._with_logprobs = tokenizer, with_logprobs
        self._id, self._created, self._model = answer_id, created, model
        self._usage = None if with_usage else UNSET

    def chunks(self, choice: int, delta: TextDelta, *, is_first: bool) -> list[bytes]:
        """The role first, then content, then the reason of the end with an empty delta."""
        chunks: list[bytes] = []
        if is_first:
            chunks.append(self._chunk(ChunkChoice(choice, Delta(role="assistant", content=""))))
        if delta.text or delta.tokens:
            logprobs = self._logprobs(delta.tokens)
            chunks.append(self._chunk(ChunkChoice(choice, Delta(content=delta.text), logprobs)))
        if delta.finish is not None:
            chunks.append(self._chunk(ChunkChoice(choice, Delta(), finish_reason=delta.finish.value)))
        return chunks

    def usage_chunk(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return _encode(ChatChunk(self._id, "chat.completion.chunk", self._created, self._model, [], usage))

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The whole document."""
        written = [
            ChatChoice(
                choice.index,
                ChatAnswerMessage("assistant", "".join(choice.text)),
                self._logprobs(choice.tokens),
                choice.finish.value if choice.finish else None,
            )
            for choice in choices
        ]
        return _encode(
            ChatCompletion(self._id, "chat.completion", self._created, self._model, written, usage)
        )

    def _chunk(self, choice: ChunkChoice) -> bytes:
        chunk = ChatChunk(
            self._id, "chat.completion.chunk", self._created, self._model, [choice], self._usage
        )
        return _encode(chunk)

    def _logprobs(self, tokens: list[ShownToken]) -> ChatLogprobs | None:
        return ChatLogprobs([self._logprob(token) for token in tokens]) if self._with_logprobs else None

    def _logprob(self, token: ShownToken) -> TokenLogprob:
        shown = shown_bytes(token, self._tokenizer.token_bytes(token.token_id))
        top = [
            TopLogprob(text, logprob, list(raw)) for text, logprob, raw in top_tokens(token, self._tokenizer)
        ]
        return TokenLogprob(token.text, chosen_logprob(token), list(shown), top)
