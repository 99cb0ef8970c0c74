"""The model that is served: its names, and its codec: tokenizer, chat template, context length.

Long texts go to a thread.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from libs.model.chat_template import ChatTemplate, load_chat_template
from libs.model.errors import TemplateError
from libs.model.gguf_config import gguf_config
from libs.model.gguf_file import GgufFile, with_header
from libs.model.hf_config import read_hf_config
from libs.model.source import find_model
from libs.model.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from services.gateway.api.errors import BadRequest, ContextTooLong, NotFound, Unavailable
from services.gateway.generation.block_hashes import BlockLayout

T = TypeVar("T")

MAX_CHARS_ON_LOOP = 8192
"""About two milliseconds of tokenising; longer texts go to a thread."""


@dataclass(frozen=True)
class TextCodec:
    """From texts and chats to token ids and back. Threads may share it."""

    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    max_position_embeddings: int

    def check_text(self, num_bytes: int, param: str) -> None:
        """Raises ContextTooLong for a text that cannot fit, before any time goes into its tokens."""
        limit_bytes = self.max_position_embeddings * self.tokenizer.longest_token_bytes
        if num_bytes > limit_bytes:
            raise ContextTooLong(
                f"a text of {num_bytes} bytes has more tokens than this model's context of "
                f"{self.max_position_embeddings}; give at most {limit_bytes} bytes",
                param=param,
            )

    async def encode_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        """Tokens of a chat. Raises BadRequest where the template does not take the messages."""

        self.check_text(sum(len(m["content"].encode()) for m in messages), "messages")

        def encode() -> list[int]:
            text = self.template.render(messages, add_generation_prompt=add_generation_prompt)
            return self.tokenizer.encode(text, add_special_tokens=False)

        try:
            return await off_loop(encode, num_chars=sum(64 + len(m["content"]) for m in messages))
        except TemplateError as error:
            raise BadRequest(str(error), param="messages") from error

    async def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokens of a plain text. Raises ContextTooLong."""
        self.check_text(len(text.encode()), "prompt")
        return await off_loop(
            lambda: self.tokenizer.encode(text, add_special_tokens=add_special_tokens), num_chars=len(text)
        )

    async def decode(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, special ones included."""
        ids = list(token_ids)
        return await off_loop(
            lambda: self.tokenizer.decode(ids, skip_special_tokens=False), num_chars=4 * len(ids)
        )

    async def encode_prompts(
        self, prompt: str | list[str | int | list[int]], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """Tokens of each prompt of a completion request: a text, token ids, or a list of either."""
        encoded: list[list[int]] = []
        for item in prompts_of(prompt):
            if isinstance(item, str):
                encoded.append(await self.encode_text(item, add_special_tokens=add_special_tokens))
            else:
                check_token_ids(item, self.vocab_size, "prompt")
                encoded.append(item)
        if not encoded or not all(encoded):
            raise BadRequest("the prompt is empty; give at least one token", param="prompt")
        return encoded

    def detokenizer(self, *, continues: bool) -> Detokenizer:
        """For one sequence; `continues`: its text goes on from the prompt's."""
        return Detokenizer(self.tokenizer, continues=continues)


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One text or list of token ids per prompt. Raises BadRequest for a mixture of ids and prompts."""
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids and len(token_ids) < len(prompt):
        raise BadRequest("a list of token ids must hold nothing else", param="prompt")
    return [token_ids] if token_ids else [item for item in prompt if not isinstance(item, int)]


def load_codec(model: str) -> TextCodec:
    """Blocks for a moment; raises `libs.model.errors.ModelError`."""
    files = with_header(find_model(model))
    config = gguf_config(files) if isinstance(files, GgufFile) else read_hf_config(files)
    tokenizer = load_tokenizer(files)
    return TextCodec(
        tokenizer=tokenizer,
        template=load_chat_template(files),
        vocab_size=min(tokenizer.vocab_size, config.vocab_size),
        max_position_embeddings=config.max_position_embeddings,
    )


async def off_loop(work: Callable[[], T], *, num_chars: int) -> T:
    """Run short work here, long work in a thread."""
    return work() if num_chars <= MAX_CHARS_ON_LOOP else await asyncio.to_thread(work)


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raise BadRequest for the first id that the model does not know."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        for token_id in token_ids:
            check_token_id(token_id, vocab_size, param)


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    """Raise BadRequest for an id that the model does not know."""
    if not 0 <= token_id < vocab_size:
        raise BadRequest(f"token id {token_id} is outside the vocabulary of {vocab_size} tokens", param=param)


class ServedModel:
    """What requests ask about the model. `worker_len` tells the shortest context of the workers, if known."""

    def __init__(
        self,
        names: tuple[str, ...],
        max_model_len: int,
        created: int,
        *,
        worker_len: Callable[[], int | None],
        place_model: Callable[[], str],
        layout: Callable[[], BlockLayout | None],
    ) -> None:
        self.names = names
        self._max_model_len, self._created, self._worker_len = max_model_len, created, worker_len
        self.place_model = place_model
        """What the router chooses instances by; empty: any."""
        self.layout = layout
        """How its workers name blocks; None while none is ready."""
        self.codec: TextCodec | None = None

    def codec_of(self, name: str | None) -> TextCodec:
        """The codec of the model called `name` (None: of the only one).

        Raises NotFound for another name, Unavailable until it is loaded.
        """
        if name is not None:
            self.check_name(name)
        if self.codec is None:
            raise Unavailable("the tokenizer is still loading", code="starting", retry_after_seconds=1)
        return self.codec

    def check_name(self, name: str) -> None:
        """Raise NotFound unless the model goes by this name."""
        if name not in self.names:
            raise NotFound(
                f"the model {name!r} does not exist; served is {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )

    def max_model_len(self) -> int:
        """The longest prompt and answer together, in tokens: the minimum of setting, model and workers."""
        limits = [self._max_model_len or None, self._worker_len()]
        if self.codec is not None:
            limits.append(self.codec.max_position_embeddings)
        return min(limit for limit in [*limits, 2**31] if limit is not None)

    def card(self, name: str) -> dict[str, Any]:
        """The entry of /v1/models."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvmesh",
            "max_model_len": self.max_model_len(),
        }


def default_name(model: str) -> str:
    """The name that clients use: the model as it was given, but of a path only its last part."""
    path = Path(model).expanduser()
    return path.resolve().name.removesuffix(".gguf") if path.exists() else model
