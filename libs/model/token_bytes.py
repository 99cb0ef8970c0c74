"""The bytes that each token stands for, by the kind of a tokenizer's decoder."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from libs.model.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling (GPT-2's): printable bytes as themselves, others as letters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    spelling = {chr(byte): byte for byte in printable}
    return spelling | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_TO_LATIN_1 = dict.fromkeys(range(256), 256) | {ord(letter): byte for letter, byte in byte_alphabet().items()}
"""Spelt letters to the characters of their bytes; what spells no byte stays, or becomes, none of Latin-1."""


@dataclass(frozen=True)
class Spelling:
    """How token strings spell bytes; `drops_first_space` is of the first token of a text."""

    is_byte_level: bool
    drops_first_space: bool = False

    def bytes_of(self, token: str) -> bytes:
        """The bytes of one token, as it is spelt in the vocabulary."""
        if self.is_byte_level:
            try:
                return token.translate(_TO_LATIN_1).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()  # an added token, which is plain text
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_WORD_START, " ").encode()


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    """Reads the spelling from a tokenizer's decoder.

    Raises:
        UnsupportedModel: it is neither byte-level BPE nor SentencePiece style.
    """
    if tokenizer.decoder is None:
        raise UnsupportedModel(
            "the tokenizer has no decoder; supported are byte-level BPE and SentencePiece style"
        )
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    if kinds <= {"ByteLevel", "Fuse"} and "ByteLevel" in kinds:
        return Spelling(is_byte_level=True)
    if kinds <= _SENTENCEPIECE_STEPS and kinds & {"Replace", "Metaspace"}:
        return Spelling(is_byte_level=False, drops_first_space=any(map(_drops_first_space, steps)))
    raise UnsupportedModel(
        f"the tokenizer's decoder {sorted(kinds)} is not supported; "
        "supported are byte-level BPE and SentencePiece style"
    )


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme") != "never")
    return bool(step["type"] == "Strip" and step.get("start", 0) > 0)
