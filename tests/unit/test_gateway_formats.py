"""The documents that clients read."""

import math
from typing import Any

import msgspec
import pytest

from libs.request.outcome import FinishReason
from libs.request.sampling import TokenLogprobs
from services.gateway.generation.chat_format import ChatFormat
from services.gateway.generation.completion_format import CompletionFormat
from services.gateway.generation.response import Choice, PromptTokensDetails, Usage
from services.gateway.generation.text import ShownToken, TextDelta
from services.gateway.openapi import openapi_document

USAGE = Usage(3, 2, 5, PromptTokensDetails(1))


class Letters:
    """Tokens are bytes; 300 is a special one, spelt out."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == 300 else bytes([token_id])


def chat(*, with_logprobs: bool = False, with_usage: bool = False) -> ChatFormat:
    return ChatFormat(
        Letters(), answer_id="i", created=1, model="m", with_logprobs=with_logprobs, with_usage=with_usage
    )


def completion(num_top_logprobs: int | None = None, echoes: tuple[str, ...] = ()) -> CompletionFormat:
    return CompletionFormat(
        Letters(),
        answer_id="i",
        created=1,
        model="m",
        num_top_logprobs=num_top_logprobs,
        with_usage=False,
        echoes=echoes,
    )


def decode(chunks: list[bytes]) -> list[Any]:
    return [msgspec.json.decode(chunk) for chunk in chunks]


def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    role, content, end = decode(chat().chunks(1, TextDelta("hi", finish=FinishReason.STOP), is_first=True))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content["choices"][0] == {
        "index": 1,
        "delta": {"content": "hi"},
        "logprobs": None,
        "finish_reason": None,
    }
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "stop")
    assert {chunk["object"] for chunk in (role, content, end)} == {"chat.completion.chunk"}
    assert "usage" not in role


def test_with_usage_each_chunk_says_null_and_the_last_has_no_choices() -> None:
    form = chat(with_usage=True)
    assert decode(form.chunks(0, TextDelta("x"), is_first=False))[0]["usage"] is None
    last = msgspec.json.decode(form.usage_chunk(USAGE))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_a_piece_without_text_makes_no_chunk() -> None:
    assert chat().chunks(0, TextDelta(), is_first=False) == []
    assert completion().chunks(0, TextDelta(), is_first=False) == []


def test_chat_logprobs_tell_text_bytes_and_alternatives() -> None:
    tokens = [
        ShownToken(0xC3, "", 0, TokenLogprobs(-0.5, (0xC3, 0x61), (-0.5, -math.inf))),
        ShownToken(0xA9, "é", 0, TokenLogprobs(-0.25)),
        ShownToken(300, "", 1, TokenLogprobs(-1.0, (300,), (-1.0,)), is_cut=True),
    ]
    chunk = decode(chat(with_logprobs=True).chunks(0, TextDelta("é", tokens), is_first=False))[0]
    first, second, end = chunk["choices"][0]["logprobs"]["content"]
    assert bytes(first["bytes"] + second["bytes"]).decode() == "é"
    assert [top["token"] for top in first["top_logprobs"]] == ["", "a"]
    assert first["top_logprobs"][1]["logprob"] == -9999.0
    assert (end["token"], end["bytes"], end["top_logprobs"][0]["token"]) == ("", [], "")


@pytest.mark.parametrize(("asked", "has_top"), [(0, False), (2, True)])
def test_completion_logprobs_are_lists_of_one_length(asked: int, has_top: bool) -> None:
    tokens = [
        ShownToken(97, "a", 0, TokenLogprobs(-0.5, (97, 98), (-0.5, -1.5))),
        ShownToken(99, "c", 1, TokenLogprobs(-0.1, (99, 97), (-0.1, -2.0))),
    ]
    chunk = decode(completion(asked).chunks(0, TextDelta("ac", tokens, FinishReason.LENGTH), is_first=True))[
        0
    ]
    logprobs = chunk["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"]) == (
        ["a", "c"],
        [-0.5, -0.1],
        [0, 1],
    )
    assert logprobs["top_logprobs"] == ([{"a": -0.5, "b": -1.5}, {"c": -0.1, "a": -2.0}] if has_top else None)
    assert chunk["choices"][0]["finish_reason"] == "length"


def test_an_echo_comes_once_in_front() -> None:
    form = completion(echoes=("p", "q"))
    assert decode(form.chunks(1, TextDelta("x"), is_first=True))[0]["choices"][0]["text"] == "qx"
    assert decode(form.chunks(1, TextDelta("y"), is_first=False))[0]["choices"][0]["text"] == "y"
    whole = msgspec.json.decode(form.whole([Choice(0, ["x", "y"], [], FinishReason.STOP)], USAGE))
    assert whole["choices"][0]["text"] == "pxy"


def test_a_whole_chat_carries_message_reason_and_usage() -> None:
    whole = msgspec.json.decode(chat().whole([Choice(0, ["a", "b"], [], FinishReason.LENGTH)], USAGE))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["total_tokens"] == 5


def test_every_reference_of_the_openapi_document_leads_somewhere() -> None:
    document = openapi_document()
    schemas = document["components"]["schemas"]
    encoded = msgspec.json.encode(document).decode()
    used = {part.split('"')[0] for part in encoded.split('"$ref":"#/components/schemas/')[1:]}
    assert used <= set(schemas)
    assert {"ChatRequest", "CompletionRequest", "ErrorDocument"} <= used
