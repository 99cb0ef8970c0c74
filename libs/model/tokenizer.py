"""Text to token ids and back. No torch: the gateway uses it."""

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from libs.model.errors import BrokenModel
from libs.model.gguf_config import gguf_eos_token_ids
from libs.model.gguf_file import GgufFile, with_header
from libs.model.gguf_tokenizer import build_gguf_tokenizer, gguf_frame
from libs.model.hf_config import read_eos_token_ids, read_if_there
from libs.model.special_tokens import gguf_special_tokens, hf_special_tokens
from libs.model.token_bytes import spelling_of


class Tokenizer:
    """One model's tokenizer. It changes nothing once made, so threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(number for number, token in added.items() if token.special)
        spelling = spelling_of(backend)
        self.drops_first_space = spelling.drops_first_space
        """Whether text begins without the space that its first token carries (SentencePiece style)."""
        self._backend = backend
        self._bytes = {number: spelling.bytes_of(token) for token, number in backend.get_vocab().items()}
        self.longest_token_bytes = max(map(len, self._bytes.values()), default=0)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` puts in front (or behind) what the model expects around a plain prompt; not for
        text from a chat template, which writes it out. Special tokens that the text spells are recognised
        either way.
        """
        # A batch of one: `encode` would hold the interpreter lock for as long as it takes.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text, perhaps part of a character; none for an unknown id."""
        return self._bytes.get(token_id, b"")


class Detokenizer:
    """Text of one sequence as its tokens come, by whole characters: what `push` returned never changes.

    A character whose bytes are spread over tokens comes with the last of them; U+FFFD comes only for bytes
    that can no longer become one. Ours and not `tokenizers.decoders.DecodeStream` because that one keeps back
    an incomplete end for ever and decodes its tokens several times over.

    `continues`: the text goes on from a prompt, so a first space is kept where the tokenizer would drop it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._drop_space = tokenizer.drops_first_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        token_bytes = self._tokenizer.token_bytes
        new = b"".join(token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped)
        if self._drop_space and new:
            self._drop_space = False
            new = new.removeprefix(b" ")
        return self._utf8.decode(new)

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for an incomplete character, else nothing."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(source: Path | GgufFile) -> Tokenizer:
    """The tokenizer of the model at `source`: a path from `find_model`, or its header.

    Raises:
        BrokenModel: its files are missing or damaged.
        UnsupportedModel: it is of a kind that cannot be built exactly.
    """
    files = with_header(source)
    return _from_gguf(files.metadata) if isinstance(files, GgufFile) else _from_directory(files)


def _from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    backend = build_gguf_tokenizer(metadata)
    add_bos, add_eos = gguf_frame(metadata)
    _frame(backend, gguf_special_tokens(metadata), add_bos=add_bos, add_eos=add_eos)
    return Tokenizer(backend, gguf_eos_token_ids(metadata))


def _from_directory(directory: Path) -> Tokenizer:
    backend = _read_tokenizer_json(directory)
    settings = read_if_there(directory / "tokenizer_config.json")
    if "add_bos_token" in settings or "add_eos_token" in settings:
        # They overrule tokenizer.json, as in transformers.
        add_bos, add_eos = bool(settings.get("add_bos_token")), bool(settings.get("add_eos_token"))
        _frame(backend, hf_special_tokens(directory), add_bos=add_bos, add_eos=add_eos)
    return Tokenizer(backend, read_eos_token_ids(directory))


def _read_tokenizer_json(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BrokenModel(
            f"tokenizer.json is missing in {directory}; make it with transformers, "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)`"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise BrokenModel(f"{path} cannot be read: {error}; download it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _frame(backend: tokenizers.Tokenizer, specials: dict[str, str], *, add_bos: bool, add_eos: bool) -> None:
    """Sets what `add_special_tokens` adds around a text."""
    bos = [specials["bos_token"]] if add_bos and "bos_token" in specials else []
    eos = [specials["eos_token"]] if add_eos and "eos_token" in specials else []
    ids = {token: backend.token_to_id(token) for token in (*bos, *eos)}
    unknown = [token for token, number in ids.items() if number is None]
    if unknown:
        raise BrokenModel(f"the vocabulary lacks {', '.join(unknown)}, which is to be added around a text")
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos], special_tokens=list(ids.items())
    )
