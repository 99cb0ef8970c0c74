"""Streams as servers send them, however they are cut on their way."""

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import events, take
from loadtest.record import Record

STREAM = b': hi\r\n\r\nevent: x\ndata: {"a": 1}\n\ndata:{"b": "\xc3\xa9"}\r\n\r\ndata: [DONE]\n\n'


async def cut(at: list[int]) -> AsyncIterator[bytes]:
    borders = [0, *sorted(at), len(STREAM)]
    for start, end in pairwise(borders):
        yield STREAM[start:end]


@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
async def test_events_are_found_wherever_the_stream_is_cut(at: list[int]) -> None:
    assert [event async for event in events(cut(at))] == [b'{"a": 1}', b'{"b": "\xc3\xa9"}', b"[DONE]"]


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        ({"choices": [{"text": "hi"}]}, "hi"),
        ({"choices": [{"delta": {"content": "hi"}}]}, "hi"),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, "hm"),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, ""),
        ({"choices": [{"delta": {"content": None}}]}, ""),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, ""),
        ({"choices": [], "usage": None}, ""),
        ({}, ""),
    ],
)
def test_the_text_of_an_event_is_found_in_every_shape(chunk: dict[str, Any], text: str) -> None:
    assert take(chunk, Record("c", 0, 0.0)) == text


def test_usage_is_noted_with_or_without_details() -> None:
    record = Record("c", 0, 0.0)
    take({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}, record)
    assert (record.num_prompt_tokens, record.num_told_tokens, record.num_cached_tokens) == (9, 3, None)
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    take({"usage": {"prompt_tokens": 9, "completion_tokens": 3, **details}}, record)
    assert record.num_cached_tokens == 4
    take({"usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}}, record)
    assert record.num_cached_tokens is None


def test_an_error_event_and_the_reason_of_the_end_are_noted() -> None:
    record = Record("c", 0, 0.0)
    take({"choices": [{"text": "", "finish_reason": "length"}]}, record)
    assert record.finish_reason == "length"
    take({"error": {"message": "worker lost"}}, record)
    assert record.error == "error_event"
    assert "worker lost" in record.detail
