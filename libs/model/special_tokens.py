"""The named special tokens of a model (`bos_token`, `eos_token`, ...), as chat templates use them."""

from pathlib import Path
from typing import Any

from libs.model.hf_config import read_if_there

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def hf_special_tokens(directory: Path) -> dict[str, str]:
    """Of a Hugging Face directory; those that are not set are left out."""
    named: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        raw = read_if_there(directory / file)
        named |= {name: _content(raw[name]) for name in _NAMES if raw.get(name) is not None}
    return named


def gguf_special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """Of a GGUF file's metadata; those that are not set are left out."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    numbers = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _GGUF_NAMES.items()}
    return {
        name: tokens[number]
        for name, number in numbers.items()
        if number is not None and 0 <= number < len(tokens)
    }


def _content(token: Any) -> str:
    """A token is written as a string or as an object with flags."""
    return str(token["content"]) if isinstance(token, dict) else str(token)
