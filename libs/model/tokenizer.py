"""Text to token ids and back. No torch: the gateway uses it."""

import codecs
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import processors

from libs.model.errors import BrokenModel
from libs.model.gguf_config import gguf_eos_token_ids
from libs.model.gguf_file import read_gguf
from libs.model.gguf_tokenizer import build_gguf_tokenizer
from libs.model.hf_config import read_eos_token_ids, read_json
from libs.model.special_tokens import gguf_special_tokens, hf_special_tokens
from libs.model.token_bytes import spelling_of


class Tokenizer:
    """One model's tokenizer. It changes nothing once made, so threads may share it."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_ids = eos_token_ids
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(number for number, token in added.items() if token.special)
        self._backend = backend
        self._spelling = spelling_of(backend)
        self._bytes: dict[int, bytes] = {}

    @property
    def drops_first_space(self) -> bool:
        """Whether text begins without the space that its first token carries (SentencePiece style)."""
        return self._spelling.drops_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        `add_special_tokens` puts in front (or behind) what the model expects around a plain prompt; not for
        text from a chat template, which writes it out. Special tokens that the text spells are recognised
        either way.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text, perhaps part of a character; none for an unknown id."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            known = self._bytes[token_id] = b"" if token is None else self._spelling.bytes_of(token)
        return known


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


def load_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer of the model at `source` (a path from `find_model`).

    Raises:
        BrokenModel: its files are missing or damaged.
        UnsupportedModel: it is of a kind that cannot be built exactly.
    """
    if source.is_file():
        metadata = read_gguf(source).metadata
        backend = build_gguf_tokenizer(metadata)
        specials = gguf_special_tokens(metadata)
        # llama.cpp's defaults: SentencePiece and Llama 3 vocabularies begin with BOS unless the file says
        # otherwise.
        begins = (
            metadata["tokenizer.ggml.model"] == "llama"
            or metadata.get("tokenizer.ggml.pre") in _BEGIN_WITH_BOS
        )
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", begins)
        _frame(
            backend, specials, add_bos=add_bos, add_eos=metadata.get("tokenizer.ggml.add_eos_token", False)
        )
        return Tokenizer(backend, gguf_eos_token_ids(metadata))
    backend = _read_tokenizer_json(source)
    settings = (
        read_json(source / "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
    )
    if (
        "add_bos_token" in settings or "add_eos_token" in settings
    ):  # they overrule tokenizer.json, as in transformers
        add_bos, add_eos = bool(settings.get("add_bos_token")), bool(settings.get("add_eos_token"))
        _frame(backend, hf_special_tokens(source), add_bos=add_bos, add_eos=add_eos)
    return Tokenizer(backend, read_eos_token_ids(source))


_BEGIN_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")


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
    bos, eos = specials.get("bos_token") if add_bos else None, specials.get("eos_token") if add_eos else None
    used = [token for token in (bos, eos) if token is not None]
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )
