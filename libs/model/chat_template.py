"""A model's chat template: messages in, prompt text out. No torch: the gateway uses it.

Rendered as transformers does, in a sandbox, because templates come with weights from anywhere.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.model.errors import BrokenModel, TemplateError
from libs.model.gguf_file import GgufFile, with_header
from libs.model.hf_config import read_if_there, read_json
from libs.model.special_tokens import gguf_special_tokens, hf_special_tokens

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CHATML_TOKENS = {"<|im_start|>", "<|im_end|>"}


class ChatTemplate:
    """One compiled template with the model's special tokens. `source` None: the model has none."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise BrokenModel(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; it spells its special tokens, so encode it without adding them.

        Raises:
            TemplateError: the template refused the messages or failed on them, or there is no template.
        """
        if self._template is None:
            raise TemplateError(
                "this model has no chat template; use text completions, or a model tuned for chat"
            )
        given = {"messages": messages, "tools": tools, "documents": None} | kwargs
        names = self._special_tokens | given | {"add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise TemplateError(f"the chat template does not accept these messages: {error}") from error


# What an expression in a template raises on messages of an unexpected form.
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def load_chat_template(source: Path | GgufFile) -> ChatTemplate:
    """The chat template of the model at `source`: a path from `find_model`, or its header.

    A model without one gets ChatML if its vocabulary has ChatML's tokens; else rendering is refused.

    Raises:
        BrokenModel: the template does not compile.
    """
    files = with_header(source)
    if isinstance(files, GgufFile):
        metadata = files.metadata
        template = metadata.get("tokenizer.chat_template")
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        return ChatTemplate(template or _chatml_for(tokens), gguf_special_tokens(metadata))
    template = _hf_template(files)
    return ChatTemplate(template or _chatml_for(_hf_added_tokens(files)), hf_special_tokens(files))


def _chatml_for(tokens: Sequence[str]) -> str | None:
    return CHATML if set(tokens) >= _CHATML_TOKENS else None


def _hf_template(directory: Path) -> str | None:
    """From chat_template.jinja, else chat_template.json, else tokenizer_config.json."""
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    for file in ("chat_template.json", "tokenizer_config.json"):
        found = read_if_there(directory / file).get("chat_template")
        if isinstance(found, list):  # several by name, the plain one is called default
            found = {entry["name"]: entry["template"] for entry in found}.get("default")
        if found is not None:
            return str(found)
    return None


def _hf_added_tokens(directory: Path) -> list[str]:
    added = read_json(directory / "tokenizer.json").get("added_tokens", [])
    return [token["content"] for token in added]


class _GenerationBlocks(Extension):
    """Lets `{% generation %}` blocks, which mark answers for training, through as they are."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    own: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(own)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
