"""Tokenizers from GGUF vocabularies, against small re-statements of what they must do."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.gguf_tokenizer import build_gguf_tokenizer, gguf_frame
from libs.model.token_bytes import byte_alphabet
from libs.model.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece vocabulary: later pieces score worse, as the trainer numbers them."""
    merged = ["▁▁", "▁▁▁▁", "▁a", "ab", "bab", "▁ab", "▁▁a", "aa", "aaaa", "aaa", "ba", "▁abab"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, "▁", "a", "b"]
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
        + [NORMAL] * (len(pieces) - 259),
    } | changes


def byte_level(pre: str = "smollm", /, **changes: Any) -> dict[str, Any]:
    """A small byte-level vocabulary: all bytes and a few merges."""
    merges = ["Ġ a", "a b", "Ġ Ġ", "1 2", "12 3", "h i", "Ġ hi", "Ġ 1", ". .", "ĠĠ Ġ"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "whole", "<|end|>", "<think>"]
    kinds = [NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": kinds,
    } | changes


def tokens_of(metadata: dict[str, Any], text: str) -> list[str]:
    return build_gguf_tokenizer(metadata).encode(text).tokens


def best_score_first(metadata: dict[str, Any], text: str) -> list[str]:
    """SentencePiece's algorithm: join the neighbours whose union scores best, leftmost first."""
    pieces, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = {piece: scores[index] for index, piece in enumerate(pieces) if index >= 259}
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(score.get(left + right), -at) for at, (left, right) in enumerate(pairwise(parts))]
        known = [union for union in unions if union[0] is not None]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    spelt: list[str] = []
    for part in parts:
        spelt.extend([part] if part in score else [f"<0x{byte:02X}>" for byte in part.encode()])
    return spelt


@given(text=st.text("ab ", max_size=24) | st.text("abé🤦 ", max_size=12))
def test_sentencepiece_joins_the_best_score_first(text: str) -> None:
    metadata = sentencepiece()
    if text:
        assert tokens_of(metadata, text) == best_score_first(metadata, text)


@given(
    text=st.text(st.characters(exclude_categories=["Cs"]).filter(lambda letter: letter != "▁"), max_size=30)
)
def test_sentencepiece_gives_back_any_text(text: str) -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(sentencepiece()), ())
    if "<" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_word_begins_after_a_special_token_unless_the_file_says_otherwise() -> None:
    assert tokens_of(sentencepiece(), "<s>a") == ["<s>", "▁a"]
    assert tokens_of(sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}), "<s>a a") == [
        "<s>",
        "a",
        "▁a",
    ]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        # digits are cut off one by one, so the spaces before them stay together
        ("smollm", "hi  12", ["hi", "ĠĠ", "1", "2"]),
        ("gpt-2", "hi  12", ["hi", "Ġ", "Ġ", "12"]),
        ("gpt-2", "123 ab", ["123", "Ġa", "b"]),
        # up to three digits together, never with the space before
        ("llama-bpe", "1234 123", ["123", "4", "Ġ", "123"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("tekken", "123", ["1", "2", "3"]),
        # punctuation by itself, digits in threes
        ("default", "1234..ab", ["123", "4", "..", "ab"]),
        # a whole word of the vocabulary counts even where no merges lead to it
        ("llama-bpe", "whole", ["whole"]),
        ("qwen2", "whole", ["w", "h", "o", "l", "e"]),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(pre: str, text: str, expected: list[str]) -> None:
    assert tokens_of(byte_level(pre), text) == expected


def test_qwen_composes_accents_and_others_do_not() -> None:
    decomposed, composed = "e\u0301", "\u00e9"
    qwen, llama = (build_gguf_tokenizer(byte_level(pre)) for pre in ("qwen2", "llama-bpe"))
    assert qwen.encode(decomposed).ids == qwen.encode(composed).ids
    assert llama.encode(decomposed).ids != llama.encode(composed).ids


def test_control_and_user_defined_tokens_are_found_in_text_and_only_control_is_skipped() -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(byte_level()), ())
    token_ids = tokenizer.encode("hi<think>hi<|end|>")
    assert len(token_ids) == 4
    assert tokenizer.decode(token_ids) == "hi<think>hi"


@given(text=texts, pre=st.sampled_from(["smollm", "default", "llama-bpe", "gpt-2", "tekken"]))
def test_byte_level_gives_back_any_text(text: str, pre: str) -> None:
    tokenizer = Tokenizer(build_gguf_tokenizer(byte_level(pre)), ())
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("metadata", "error", "complaint"),
    [
        (byte_level("chatglm-bpe"), UnsupportedModel, "'chatglm-bpe' is not supported"),
        (byte_level(**{"tokenizer.ggml.model": "bert"}), UnsupportedModel, "'bert' is not supported"),
        (byte_level(**{"tokenizer.ggml.merges": None}), BrokenModel, "merges"),
        (byte_level(**{"tokenizer.ggml.token_type": [1]}), BrokenModel, "1 token types"),
        (sentencepiece(**{"tokenizer.ggml.scores": None}), BrokenModel, "scores"),
        ({}, BrokenModel, "no tokenizer"),
    ],
)
def test_what_cannot_be_built_exactly_is_refused_by_name(
    metadata: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        build_gguf_tokenizer(metadata)


@pytest.mark.parametrize(
    ("metadata", "frame"),
    [
        (sentencepiece(), (True, False)),
        (sentencepiece(**{"tokenizer.ggml.add_bos_token": False}), (False, False)),
        (byte_level("llama-bpe"), (True, False)),
        (byte_level("qwen2"), (False, False)),
        (byte_level("qwen2", **{"tokenizer.ggml.add_eos_token": True}), (False, True)),
    ],
)
def test_begin_and_end_are_added_as_the_file_says_or_as_llama_cpp_does(
    metadata: dict[str, Any], frame: tuple[bool, bool]
) -> None:
    assert gguf_frame(metadata) == frame
