"""The documents of POST /v1/completions."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from libs.model.tokenizer import Tokenizer
from services.gateway.generation.response import Choice, Usage, chosen_logprob, top_tokens
from services.gateway.generation.text import ShownToken, TextDelta

_encode = msgspec.json.Encoder().encode


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists of one length: one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One answer, or a chunk's part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer; the chunks of a stream have the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionFormat:
    """Writes the answer to one completion request. `echoes` are the prompts' texts by choice, or empty."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        answer_id: str,
        created: int,
        model: str,
        num_top_logprobs: int | None,
        with_usage: bool,
        echoes: tuple[str, ...] = (),
    ) -> None:
        self._tokenizer, self._num_top_logprobs, self._echoes = tokenizer, num_top_logprobs, echoes
        self._id, self._created, self._model = answer_id, created, model
        self._usage = None if with_usage else UNSET

    def chunks(self, choice: int, delta: TextDelta, *, is_first: bool) -> list[bytes]:
        """One chunk; the first carries the echo, the last the reason of the end."""
        text = self._echo(choice) + delta.text if is_first else delta.text
        if not (text or delta.tokens or delta.finish):
            return []
        written = CompletionChoice(
            choice, text, self._logprobs(delta.tokens), delta.finish.value if delta.finish else None
        )
        return [self._document([written], self._usage)]

    def usage_chunk(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return self._document([], usage)

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The whole document."""
        written = [
            CompletionChoice(
                choice.index,
                self._echo(choice.index) + "".join(choice.text),
                self._logprobs(choice.tokens),
                choice.finish.value if choice.finish else None,
            )
            for choice in choices
        ]
        return self._document(written, usage)

    def _echo(self, choice: int) -> str:
        return self._echoes[choice] if self._echoes else ""

    def _document(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return _encode(Completion(self._id, "text_completion", self._created, self._model, choices, usage))

    def _logprobs(self, tokens: list[ShownToken]) -> CompletionLogprobs | None:
        if self._num_top_logprobs is None:
            return None
        return CompletionLogprobs(
            tokens=[token.text for token in tokens],
            token_logprobs=[chosen_logprob(token) for token in tokens],
            top_logprobs=self._tops(tokens) if self._num_top_logprobs else None,
            text_offset=[token.offset for token in tokens],
        )

    def _tops(self, tokens: list[ShownToken]) -> list[dict[str, float]]:
        return [
            {text: logprob for text, logprob, _ in top_tokens(token, self._tokenizer)} for token in tokens
        ]
