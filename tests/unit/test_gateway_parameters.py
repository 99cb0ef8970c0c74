"""Bodies and parameters: what is wrong is named, what is right means what it says."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.body import decode_json
from services.gateway.api.errors import ApiError, BadRequest, ContextTooLong
from services.gateway.generation.fields import ChatRequest, CompletionRequest
from services.gateway.generation.model import prompts_of
from services.gateway.generation.parameters import (
    check_chat,
    check_completion,
    message_texts,
    num_new_tokens,
    sampling_params,
    stop_strings,
)

chat_decoder = msgspec.json.Decoder(ChatRequest)
completion_decoder = msgspec.json.Decoder(CompletionRequest)


def chat(**change: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **change}
    return decode_json(msgspec.json.encode(body), chat_decoder)


def completion(**change: Any) -> CompletionRequest:
    return decode_json(msgspec.json.encode({"model": "m", "prompt": "hi", **change}), completion_decoder)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\ud800x", "messages": []}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"{} trailing",
        b'{"messages": ' + b"[" * 100_000,
        b'{"metadata": ' + b'{"a":' * 100_000,
    ],
)
def test_broken_json_of_any_kind_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_json(body, chat_decoder)


@given(st.binary(max_size=200))
def test_no_bytes_at_all_raise_anything_but_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_json(body, chat_decoder)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"model": 1}, "model"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
def test_each_wrong_field_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**change)
    assert refused.value.param == param
    assert param.partition("[")[0] in refused.value.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_what_changes_the_meaning_and_is_not_served_is_refused_by_name(
    change: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        check_chat(chat(**change))
    assert refused.value.param == param


@pytest.mark.parametrize(
    "change",
    [
        {"user": "u", "metadata": {"a": {"b": [1]}}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"tools": None, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"temperature": None, "n": None, "stop": None, "seed": None, "logit_bias": None, "logprobs": None},
        {"reasoning_effort": "low", "prompt_cache_key": "k", "safety_identifier": "s"},
        {"max_tokens": 3, "max_completion_tokens": 3},
    ],
)
def test_harmless_fields_are_accepted(change: dict[str, Any]) -> None:
    check_chat(chat(**change))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 0}, "echo"),
    ],
)
def test_completions_refuse_what_they_cannot_do(change: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        check_completion(completion(**change))
    assert refused.value.param == param


def test_content_may_be_text_or_text_parts_and_developers_are_systems() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}])
    assert message_texts(asked.messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "x"},
    ],
)
def test_messages_that_are_not_text_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        message_texts(chat(messages=[message]).messages)
    assert (refused.value.param or "").startswith("messages[0].")


@pytest.mark.parametrize(
    ("wanted", "default", "expected"), [(None, None, 90), (None, 16, 16), (5, 16, 5), (100, None, 90)]
)
def test_new_tokens_are_what_is_wanted_within_what_is_left(
    wanted: int | None, default: int | None, expected: int
) -> None:
    assert num_new_tokens(wanted, default, num_prompt_tokens=10, max_model_len=100, param="p") == expected


def test_a_prompt_without_room_for_an_answer_is_too_long() -> None:
    with pytest.raises(ContextTooLong) as refused:
        num_new_tokens(None, 16, num_prompt_tokens=100, max_model_len=100, param="prompt")
    assert refused.value.code == "context_length_exceeded"


def test_more_tokens_than_the_context_can_ever_hold_are_refused() -> None:
    with pytest.raises(BadRequest, match="context of 100"):
        num_new_tokens(10**30, None, num_prompt_tokens=10, max_model_len=100, param="p")


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": {"100": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"9" * 5000: 1}},
        {"stop_token_ids": [100]},
        {"min_tokens": 9},
    ],
)
def test_ids_outside_the_vocabulary_and_contradictions_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError):
        sampling_params(
            chat(**change), requested_tokens=8, max_tokens=8, seed=1, logprobs=None, vocab_size=100
        )


def test_parameters_arrive_as_they_were_given() -> None:
    asked = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        logit_bias={"7": -5},
        stop_token_ids=[3],
        ignore_eos=True,
    )
    params = sampling_params(asked, requested_tokens=8, max_tokens=8, seed=-1, logprobs=2, vocab_size=100)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 0, 0.1)
    assert (params.logit_bias, params.stop_token_ids, params.ignore_eos) == ({7: -5.0}, (3,), True)
    assert (params.seed, params.logprobs) == (2**63 - 1, 2)


def test_stop_strings_are_taken_once_each() -> None:
    assert stop_strings(chat(stop="a")) == ("a",)
    assert stop_strings(chat(stop=["b", "a", "b"])) == ("b", "a")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ["x"]),
        ([1, 2], [[1, 2]]),
        (["x", "y"], ["x", "y"]),
        (["x", [1]], ["x", [1]]),
        ([[1], [2]], [[1], [2]]),
    ],
)
def test_prompts_are_texts_token_lists_or_lists_of_both(prompt: Any, expected: Any) -> None:
    assert prompts_of(completion(prompt=prompt).prompt) == expected


def test_token_ids_among_prompts_are_refused() -> None:
    with pytest.raises(BadRequest):
        prompts_of(completion(prompt=[1, "x"]).prompt)
