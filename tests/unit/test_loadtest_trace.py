"""Recorded loads: read, scaled, and put into text that is shared exactly where the recorded one was."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.kv.access_trace import TraceLine, encode_line, hash_ids
from loadtest.trace import ReplayRules, TracedRequest, TraceError, read_trace, replay

MOONCAKE = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 10, "output_length": 0, "hash_ids": ["a"]}
"""
STORES = """\
{"timestamp": 5000, "input_length": 40, "output_length": 0, "hash_ids": [1, 2], "request_id": "r"}
{"timestamp": 5001, "input_length": 40, "output_length": 0, "hash_ids": [3], "request_id": "r"}
{"timestamp": 5500, "kind": "fetch", "input_length": 0, "output_length": 0, "request_id": "r"}
{"timestamp": 6000, "kind": "put", "input_length": 0, "output_length": 9, "hash_ids": [7], "request_id": "r"}
{"timestamp": 6500, "kind": "put", "input_length": 0, "output_length": 8, "request_id": "other"}
{"timestamp": 4500, "input_length": 8, "output_length": 0, "hash_ids": []}
{"timestamp": 7000, "input_len"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def prompts(requests: Sequence[TracedRequest], rules: ReplayRules) -> list[list[str]]:
    texts: list[list[str]] = []
    for arrival in replay(requests, rules):
        (turn,) = arrival.conversation.turns
        texts.append(turn.prompt.split() if isinstance(turn.prompt, str) else list(map(str, turn.prompt)))
    return texts


def num_shared(one: list[str], other: list[str]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_mooncakes_lines_are_read_in_order_of_time(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "trace.jsonl", MOONCAKE)) == [
        TracedRequest(1.0, 1100, 50, (0, 1, 2)),
        TracedRequest(3.0, 10, 0, ("a",)),
        TracedRequest(3.5, 1024, 7, (0, 1)),
    ]


def test_a_stores_lines_are_joined_by_request_and_one_cut_at_the_end_is_passed_over(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "trace.jsonl", STORES)) == [
        TracedRequest(4.5, 8, 0, ()),
        TracedRequest(5.0, 40, 9, (1, 2, 3)),
    ]


def test_what_a_store_writes_is_read(tmp_path: Path) -> None:
    lines = [
        TraceLine(
            timestamp=1000.5, input_length=40, hash_ids=hash_ids([b"a" * 16, b"b" * 16]), request_id="r"
        ),
        TraceLine(timestamp=2000, kind="put", output_length=5, hash_ids=(1,), request_id="r"),
    ]
    path = tmp_path / "access.jsonl"
    path.write_bytes(b"".join(map(encode_line, lines)))
    (request,) = read_trace(path)
    assert (request.at_seconds, request.num_input_tokens, request.num_output_tokens) == (1.0005, 40, 5)
    assert request.hash_ids == hash_ids([b"a" * 16, b"b" * 16])


def test_azures_lines_are_read(tmp_path: Path) -> None:
    one, two = read_trace(write(tmp_path, "trace.csv", AZURE))
    assert (one.num_input_tokens, one.num_output_tokens, one.hash_ids) == (374, 44, ())
    assert two.at_seconds - one.at_seconds == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}', "line 1"),
        ("a.jsonl", MOONCAKE + "{nothing\n", "line 4"),
        ("a.jsonl", "[1]", "line 1"),
        ("a.csv", "TIMESTAMP,ContextTokens\nyesterday,5", "line 2"),
    ],
)
def test_what_is_no_trace_is_said_with_its_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        list(read_trace(write(tmp_path, name, text)))


def test_times_begin_with_the_first_request_and_go_as_fast_as_asked() -> None:
    requests = [TracedRequest(at, 5, 5) for at in (100.0, 101.0, 105.0)]
    assert [a.at_seconds for a in replay(requests, ReplayRules(speed=2))] == [0, 0.5, 2.5]
    assert list(replay([], ReplayRules())) == []


IDS = st.lists(st.integers(0, 3), max_size=6)


@given(IDS, IDS, st.integers(0, 15), st.integers(0, 15), st.booleans())
def test_prompts_share_text_exactly_as_far_as_their_hash_ids_agree(
    one: list[int], other: list[int], cut_one: int, cut_other: int, as_ids: bool
) -> None:
    rules = ReplayRules(block_tokens=16, id_range=(0, 30_000) if as_ids else None)
    lengths = [max(1, 16 * len(ids) - cut) for ids, cut in ((one, cut_one), (other, cut_other))]
    first, second = prompts(
        [TracedRequest(0, num, 1, tuple(ids)) for num, ids in zip(lengths, (one, other), strict=True)], rules
    )
    assert [len(first), len(second)] == lengths
    num_equal = num_shared(list(map(str, one)), list(map(str, other)))
    assert num_shared(first, second) >= min(16 * num_equal, *lengths)
    if num_equal < min(len(one), len(other)) and min(lengths) > 16 * num_equal + 8:
        assert num_shared(first, second) < 16 * num_equal + 8, "blocks of other ids are other text"


def test_scaled_lengths_keep_what_was_shared() -> None:
    requests = [TracedRequest(0, 1500, 100, (0, 1, 2)), TracedRequest(0, 1400, 100, (0, 1, 3))]
    first, second = prompts(requests, ReplayRules(length_scale=0.1))
    assert (len(first), len(second)) == (150, 140)
    assert 102 <= num_shared(first, second) < 110
    outputs = [a.conversation.turns[0].max_tokens for a in replay(requests, ReplayRules(length_scale=0.1))]
    assert outputs == [10, 10]


def test_lengths_are_cut_at_their_limits_and_never_empty() -> None:
    rules = ReplayRules(max_input_tokens=20, max_output_tokens=3)
    request = TracedRequest(0, 1500, 100, (0, 1, 2))
    (arrival,) = replay([request], rules)
    assert arrival.conversation.turns[0].max_tokens == 3
    assert len(prompts([request], rules)[0]) == 20
    (empty,) = replay([TracedRequest(0, 0, 0)], ReplayRules())
    assert empty.conversation.turns[0].max_tokens == 1
    assert len(prompts([TracedRequest(0, 0, 0)], ReplayRules())[0]) == 1


def test_requests_without_hash_ids_share_nothing() -> None:
    first, second = prompts([TracedRequest(0, 50, 1), TracedRequest(0, 50, 1)], ReplayRules())
    assert num_shared(first, second) < 8


def test_token_ids_lie_in_their_range() -> None:
    rules = ReplayRules(id_range=(100, 110))
    (arrival,) = replay([TracedRequest(0, 300, 1, (1,))], rules)
    prompt = arrival.conversation.turns[0].prompt
    assert len(prompt) == 300
    assert all(isinstance(token, int) and 100 <= token < 110 for token in prompt)
    assert json.dumps(list(prompt))
