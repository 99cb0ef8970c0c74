"""kvmesh chat against a gateway made of canned answers, cut at every place a network may cut."""

import io
import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.__main__ import main
from services.cli.chat import answer_once, converse, opening
from services.cli.gateway import Answer, ChatRequest, Gateway, GatewayError

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def sse(*chunks: dict[str, Any] | str) -> bytes:
    return "".join(f"data: {c if isinstance(c, str) else json.dumps(c)}\n\n" for c in chunks).encode()


def delta(text: str | None, finish: str | None = None) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish}]
    }


HELLO = sse(
    delta(""), delta("Hé"), delta("llo"), delta(None, "stop"), {"choices": [], "usage": USAGE}, "[DONE]"
)


class Pieces(httpx.SyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self.pieces


def gateway(stream: bytes | list[bytes], seen: list[dict[str, Any]] | None = None) -> Gateway:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "other"}]})
        if seen is not None:
            seen.append(json.loads(request.content) | {"authorization": request.headers.get("authorization")})
        return httpx.Response(200, stream=Pieces(stream if isinstance(stream, list) else [stream]))

    return Gateway("http://gateway/", "key", httpx.MockTransport(answer))


def refusing(status: int, body: bytes) -> Gateway:
    return Gateway(
        "http://gateway", transport=httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    )


def ask(to: Gateway, **parameters: Any) -> tuple[list[str], Answer]:
    answer = Answer()
    request = ChatRequest(opening("Hi", ""), **parameters)
    return list(to.chat(request, answer)), answer


def test_pieces_come_as_they_are_sent_and_the_answer_is_complete_at_the_end() -> None:
    pieces, answer = ask(gateway(HELLO))
    assert pieces == ["Hé", "llo"]
    assert (answer.text, answer.finish_reason, answer.usage, answer.model) == ("Héllo", "stop", USAGE, "tiny")
    assert answer.first_text_seconds is not None
    assert answer.total_seconds >= answer.first_text_seconds


@given(st.lists(st.integers(1, len(HELLO) - 1), max_size=8))
def test_it_does_not_matter_how_the_stream_is_cut(cuts: list[int]) -> None:
    bounds = [0, *sorted(set(cuts)), len(HELLO)]
    pieces, _ = ask(gateway([HELLO[a:b] for a, b in pairwise(bounds)]))
    assert "".join(pieces) == "Héllo"


def test_what_was_asked_for_is_sent_and_what_was_not_is_left_to_the_gateway() -> None:
    seen: list[dict[str, Any]] = []
    ask(gateway(HELLO, seen), model="big", max_tokens=8, temperature=0.0)
    ask(gateway(HELLO, seen))
    assert (seen[0]["model"], seen[0]["max_tokens"], seen[0]["temperature"]) == ("big", 8, 0.0)
    assert seen[0]["authorization"] == "Bearer key"
    assert "max_tokens" not in seen[1]
    assert "temperature" not in seen[1]


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (sse(delta("He"), {"error": {"message": "worker lost", "type": "x"}}), "worker lost"),
        (sse(delta("He")), "broke off"),
        (b"data: {broken\n\n", "no answer of a gateway"),
    ],
)
def test_a_stream_that_fails_is_an_error(stream: bytes, said: str) -> None:
    with pytest.raises(GatewayError, match=said):
        ask(gateway(stream))


@pytest.mark.parametrize(
    ("to", "said"),
    [
        (refusing(404, b'{"error": {"message": "no model big"}}'), r"no model big \(HTTP 404\)"),
        (refusing(502, b"bad gateway"), r"bad gateway \(HTTP 502\)"),
        (refusing(503, b"[1]"), r"\(HTTP 503\)"),
    ],
)
def test_a_refusal_is_told_in_the_gateways_words(to: Gateway, said: str) -> None:
    with pytest.raises(GatewayError, match=said):
        ask(to, model="big")


def test_who_lacks_an_api_key_is_told_how_this_command_takes_one() -> None:
    body = b'{"error": {"message": "send a header", "code": "invalid_api_key"}}'
    with pytest.raises(GatewayError, match=r"--api-key or \$KVMESH_API_KEY \(HTTP 401\)"):
        refusing(401, body).mesh()


def test_an_answer_is_streamed_as_text_or_written_as_one_json_object() -> None:
    as_text, as_json = io.StringIO(), io.StringIO()
    request = ChatRequest(opening("Hi", "Be kind."))
    answer_once(gateway(HELLO), request, as_json=False, out=as_text)
    answer_once(gateway(HELLO), request, as_json=True, out=as_json)
    assert as_text.getvalue() == "Héllo\n"
    report = json.loads(as_json.getvalue())
    assert (report["text"], report["usage"], report["finish_reason"]) == ("Héllo", USAGE, "stop")
    assert set(report["timings"]) == {"time_to_first_token_seconds", "total_seconds", "tokens_per_second"}


@given(st.integers(0, 100), st.floats(0, 10), st.floats(0, 10))
def test_a_rate_is_told_only_where_there_is_one(num_tokens: int, first: float, more: float) -> None:
    answer = Answer(
        usage={"completion_tokens": num_tokens}, first_text_seconds=first, total_seconds=first + more
    )
    rate = answer.tokens_per_second
    assert (rate is None) == (num_tokens < 2 or first + more - first <= 0)


def lines(*said: str | type[BaseException]) -> Callable[[str], str]:
    waiting = list(said)

    def read_line(_prompt: str) -> str:
        if not waiting:
            raise EOFError
        if isinstance(said := waiting.pop(0), str):
            return said
        raise said

    return read_line


def test_a_conversation_remembers_what_was_said() -> None:
    seen: list[dict[str, Any]] = []
    out = io.StringIO()
    before = ChatRequest([{"role": "system", "content": "Be kind."}], "tiny")
    converse(gateway(HELLO, seen), before, read_line=lines("One", "", "Two"), out=out)
    roles = [[m["role"] for m in request["messages"]] for request in seen]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert seen[1]["messages"][2]["content"] == "Héllo"
    assert out.getvalue().count("Héllo") == 2


def test_a_question_that_failed_is_forgotten_and_the_conversation_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = io.StringIO()
    converse(refusing(503, b"full"), ChatRequest([], "tiny"), read_line=lines("One", "Two"), out=out)
    assert capsys.readouterr().err.count("kvmesh: full (HTTP 503)") == 2


def test_ctrl_c_at_the_prompt_ends_the_conversation() -> None:
    converse(gateway(HELLO), ChatRequest([], "tiny"), read_line=lines(KeyboardInterrupt), out=io.StringIO())


def test_without_a_gateway_it_is_one_clear_line_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "Hi", "--url", "http://127.0.0.1:1"]) == 1
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 1
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith("kvmesh: no gateway at http://127.0.0.1:1")
        assert "kvmesh up" in line


@pytest.mark.parametrize(
    "words", [[], ["dance"], ["chat", "--max-tokens", "0"], ["chat", "--temperature", "hot"]]
)
def test_a_bad_command_line_is_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: kvmesh" in capsys.readouterr().err


def test_version_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("kvmesh 0.")
