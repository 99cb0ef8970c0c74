"""The model's language: tokenizer, chat template, context length. Long texts go to a thread."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from libs.model.chat_template import ChatTemplate, load_chat_template
from libs.model.errors import TemplateError
from libs.model.gguf_config import gguf_config
from libs.model.gguf_file import GgufFile, with_header
from libs.model.hf_config import read_hf_config
from libs.model.source import find_model
from libs.model.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from services.gateway.api.errors import BadRequest, ContextTooLong
from services.gateway.generation.parameters import check_token_ids

T = TypeVar("T")

MAX_CHARS_ON_LOOP = 8192
"""About two milliseconds of tokenising; longer texts go to a thread."""


@dataclass(frozen=True)
class Language:
    """What the gateway knows of the model. Threads may share it."""

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


def load_language(model: str) -> Language:
    """Blocks for a moment; raises `libs.model.errors.ModelError`."""
    files = with_header(find_model(model))
    config = gguf_config(files) if isinstance(files, GgufFile) else read_hf_config(files)
    tokenizer = load_tokenizer(files)
    return Language(
        tokenizer=tokenizer,
        template=load_chat_template(files),
        vocab_size=min(tokenizer.vocab_size, config.vocab_size),
        max_position_embeddings=config.max_position_embeddings,
    )


async def off_loop(work: Callable[[], T], *, num_chars: int) -> T:
    """Run short work here, long work in a thread."""
    return work() if num_chars <= MAX_CHARS_ON_LOOP else await asyncio.to_thread(work)
