"""Text to tokens and back with the default model's tokenizer; text that comes token by token."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from libs.model.errors import BrokenModel, UnsupportedModel
from libs.model.source import find_model
from libs.model.tokenizer import Detokenizer, Tokenizer, load_tokenizer

SMOLLM2 = load_tokenizer(find_model("smollm2-135m-instruct"))
IM_START, IM_END = 1, 2
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# Its vocabulary has no token for 21 bytes (some control characters, far planes): encoding drops them.
SPELLABLE = {SMOLLM2.token_bytes(token_id) for token_id in range(SMOLLM2.vocab_size)}
spellable_texts = texts.map(
    lambda text: "".join(
        letter for letter in text if all(bytes([byte]) in SPELLABLE for byte in letter.encode())
    )
)
token_lists = st.lists(st.integers(0, SMOLLM2.vocab_size - 1), max_size=40)


def streamed(tokenizer: Tokenizer, token_ids: list[int], **options: bool) -> list[str]:
    """The pieces of text that come with each token, and what comes at the end."""
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


@given(text=spellable_texts)
def test_text_comes_back_whole(text: str) -> None:
    token_ids = SMOLLM2.encode(text, add_special_tokens=False)
    assert SMOLLM2.decode(token_ids, skip_special_tokens=False) == text


@given(text=spellable_texts)
def test_streamed_text_never_holds_half_a_character(text: str) -> None:
    pieces = streamed(SMOLLM2, SMOLLM2.encode(text), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@given(token_ids=token_lists, data=st.data())
def test_any_tokens_in_any_portions_give_the_text_of_the_whole(
    token_ids: list[int], data: st.DataObject
) -> None:
    detokenizer, pieces, start = Detokenizer(SMOLLM2), [], 0
    while start < len(token_ids):
        end = data.draw(st.integers(start + 1, len(token_ids)))
        pieces.append(detokenizer.push(token_ids[start:end]))
        start = end
    whole = SMOLLM2._backend.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces) + detokenizer.finish() == whole == SMOLLM2.decode(token_ids)


@given(token_ids=token_lists)
def test_the_text_of_a_prefix_is_a_prefix_of_the_text(token_ids: list[int]) -> None:
    detokenizer, text = Detokenizer(SMOLLM2), ""
    for count in range(len(token_ids)):
        text += detokenizer.push(token_ids[count : count + 1])
        assert SMOLLM2.decode(token_ids[: count + 1]).startswith(text)
    text += detokenizer.finish()
    assert text == SMOLLM2.decode(token_ids)


def test_an_emoji_comes_with_its_last_token() -> None:
    token_ids = SMOLLM2.encode("🤦")
    assert len(token_ids) > 1
    assert streamed(SMOLLM2, token_ids) == [""] * (len(token_ids) - 1) + ["🤦", ""]


def test_an_incomplete_character_shows_at_the_end_only() -> None:
    token_ids = SMOLLM2.encode("x🤦")[:-1]
    pieces = streamed(SMOLLM2, token_ids)
    assert pieces[0] == "x"
    assert set(pieces[1:-1]) <= {""}
    assert pieces[-1] == "\ufffd"


@given(token_ids=token_lists)
def test_token_bytes_join_to_the_bytes_of_the_text(token_ids: list[int]) -> None:
    joined = b"".join(SMOLLM2.token_bytes(token_id) for token_id in token_ids)
    assert joined.decode("utf-8", "replace") == SMOLLM2.decode(token_ids, skip_special_tokens=False)


def test_every_token_has_bytes() -> None:
    assert all(SMOLLM2.token_bytes(token_id) for token_id in range(SMOLLM2.vocab_size))


@pytest.mark.parametrize("token_id", [-1, SMOLLM2.vocab_size, 10**9])
def test_ids_beyond_the_vocabulary_are_no_text(token_id: int) -> None:
    assert SMOLLM2.token_bytes(token_id) == b""
    assert SMOLLM2.decode([token_id]) == ""


def test_special_tokens_are_recognised_and_skipped() -> None:
    token_ids = SMOLLM2.encode("<|im_start|>user\nhi<|im_end|>")
    assert (token_ids[0], token_ids[-1]) == (IM_START, IM_END)
    assert SMOLLM2.decode(token_ids) == "user\nhi"
    assert SMOLLM2.decode(token_ids, skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>"
    assert {IM_START, IM_END} <= SMOLLM2.special_token_ids


def test_the_end_of_a_turn_is_an_end_of_text() -> None:
    assert SMOLLM2.eos_token_ids == (IM_END,)
    assert SMOLLM2.vocab_size == 49152


def test_digits_are_cut_from_the_spaces_before_them() -> None:
    two_spaces = SMOLLM2.encode("  ")
    assert len(two_spaces) == 1
    assert SMOLLM2.encode("a  42")[1:] == [*two_spaces, *SMOLLM2.encode("4"), *SMOLLM2.encode("2")]


# Hugging Face directories


def byte_level(extra: tuple[str, ...] = ("<s>", "</s>")) -> tokenizers.Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate([*letters, "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(extra))
    return backend


def save(directory: Path, backend: tokenizers.Tokenizer, **settings: Any) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_a_tokenizer_json_is_read_with_its_ends_of_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    tokenizer = load_tokenizer(save(tmp_path, byte_level()))
    assert tokenizer.decode(tokenizer.encode("abé")) == "abé"
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (259, (258,))


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [257], []),
        ({"add_bos_token": True, "add_eos_token": True}, [257], [258]),
        ({"add_bos_token": False}, [], []),
    ],
)
def test_what_is_added_around_a_text_follows_the_flags(
    flags: dict[str, bool], before: list[int], after: list[int], tmp_path: Path
) -> None:
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), **names, **flags))
    assert tokenizer.encode("ab") == [*before, 256, *after]
    assert tokenizer.encode("ab", add_special_tokens=False) == [256]


def test_a_token_to_be_added_that_is_not_in_the_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match="lacks <bos>"):
        load_tokenizer(save(tmp_path, byte_level(), bos_token="<bos>", add_bos_token=True))


def test_truncation_and_padding_in_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(save(tmp_path, backend)).encode("xyz")) == 3


def test_a_missing_or_damaged_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenModel, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenModel, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_other_kinds_of_tokenizers_are_refused(decoder: Any, tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoder
    with pytest.raises(UnsupportedModel, match="decoder"):
        load_tokenizer(save(tmp_path, backend))


def sentencepiece_style() -> Tokenizer:
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend, ())


def test_a_text_begins_without_the_space_of_its_first_word() -> None:
    tokenizer = sentencepiece_style()
    space_a, plain_a, bos = 260, 259, 1
    assert streamed(tokenizer, [bos, space_a, space_a, plain_a]) == ["", "a", " a", "a", ""]
    assert streamed(tokenizer, [space_a, space_a], continues=True) == [" a", " a", ""]


@given(text=texts.filter(lambda text: "▁" not in text))
def test_byte_tokens_join_to_characters(text: str) -> None:
    tokenizer = sentencepiece_style()
    token_ids = [2 + byte for byte in text.encode()]
    pieces = streamed(tokenizer, token_ids, continues=True)
    assert "".join(pieces) == text
    assert tokenizer.decode(token_ids) == text.removeprefix(" ") == tokenizer._backend.decode(token_ids)


def test_a_tokenizer_may_be_used_from_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda n: SMOLLM2.decode(SMOLLM2.encode(f"text {n}")), range(200)))
    assert results == [f"text {n}" for n in range(200)]
