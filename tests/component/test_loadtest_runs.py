"""The program against a server that does what a test says."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from libs.runtime.http_server import HttpServer

Serve = Callable[["Server", dict[str, Any]], Awaitable[Response]]


def event(document: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(document).encode()


def stream(
    *pieces: str, chat: bool = False, usage: dict[str, Any] | None = None, done: bool = True
) -> Response:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield event({"choices": [{"delta": {"content": piece}} if chat else {"text": piece}]})
        if usage is not None:
            yield event({"choices": [], "usage": usage})
        if done:
            yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


async def say_hello(server: "Server", body: dict[str, Any]) -> Response:
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    return stream("hel", "lo", chat="messages" in body, usage=usage)


@dataclass
class Server:
    serve: Serve = say_hello
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    all_came: asyncio.Event = field(default_factory=asyncio.Event)
    num_awaited: int = 0
    url: str = ""

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.came.set()
        if len(self.bodies) >= self.num_awaited:
            self.all_came.set()
        return await self.serve(self, body)

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": "the-model"}]})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    paths = ("/v1/chat/completions", "/v1/completions")
    routes = [Route(path, server.answer, methods=["POST"]) for path in paths]
    app = Starlette(routes=[*routes, Route("/v1/models", server.models)])
    http = HttpServer(app, host="127.0.0.1", port=0)
    server.url = await http.open()
    yield server
    server.all_came.set()
    await http.close()


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loadtest",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def load(server: Server, *flags: str, code: int = 0) -> dict[str, Any]:
    """The JSON report of a run."""
    process = await start("--url", server.url, "--output", "-", *flags)
    out, said = await process.communicate()
    assert process.returncode == code, said.decode()
    report: dict[str, Any] = json.loads(out)
    return report


async def test_arrivals_do_not_wait_for_answers(server: Server) -> None:
    async def answer_when_all_are_there(server: Server, body: dict[str, Any]) -> Response:
        await server.all_came.wait()
        return await say_hello(server, body)

    server.serve, server.num_awaited = answer_when_all_are_there, 20
    report = await load(server, "--rate", "200", "--num", "20")
    assert report["requests"]["succeeded"] == 20
    assert report["most_in_flight"] == 20


async def test_what_too_many_open_requests_hold_back_is_reported(server: Server) -> None:
    num_open = most_open = 0

    async def answer_slowly(server: Server, body: dict[str, Any]) -> Response:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        await asyncio.sleep(0.06)
        num_open -= 1
        return await say_hello(server, body)

    server.serve = answer_slowly
    report = await load(
        server, "--rate", "inf", "--arrivals", "constant", "--num", "10", "--max-in-flight", "2"
    )
    assert most_open == 2
    assert report["most_in_flight"] == 2
    assert report["requests"]["held_back"] >= 6
    assert report["requests"]["longest_held_back_seconds"] > 0.2


async def test_the_report_counts_tokens_as_the_server_does(server: Server) -> None:
    report = await load(server, "--rate", "50", "--num", "4", "--target-ttft", "30", "--name", "mine")
    assert report["tokens"] == {"prompt": 40, "output": 8, "cached": 16, "cached_share": 0.4}
    assert report["inter_token_latency_seconds"]["count"] == 4
    assert report["goodput"]["share"] == 1.0
    assert (report["name"], report["settings"]["model"]) == ("mine", "the-model")
    body = server.bodies[0]
    assert (body["model"], body["stream"], body["max_tokens"]) == ("the-model", True, 64)
    assert body["stream_options"] == {"include_usage": True}
    assert len(body["prompt"].split()) == 576


async def test_every_kind_of_failure_is_counted_by_its_name(server: Server) -> None:
    answers = [
        JSONResponse({"error": {"message": "slow down"}}, 429),
        JSONResponse({}, 503),
        stream("a", done=False),
        StreamingResponse(iter([event({"error": {"message": "lost"}})]), media_type="text/event-stream"),
        StreamingResponse(iter([b"data: {nothing\n\n"]), media_type="text/event-stream"),
        StreamingResponse(iter([b"data: 7\n\n"]), media_type="text/event-stream"),
    ]

    async def answer_in_turn(_server: Server, _body: dict[str, Any]) -> Response:
        return answers.pop(0)

    server.serve = answer_in_turn
    report = await load(server, "--rate", "100", "--num", "6", code=1)
    expected = {"http_429": 1, "http_503": 1, "broken_off": 1, "error_event": 1, "bad_answer": 2}
    assert report["errors"] == expected
    assert report["requests"]["failed"] == 6


async def test_a_silent_server_is_a_timeout(server: Server) -> None:
    async def say_nothing(server: Server, body: dict[str, Any]) -> Response:
        await server.all_came.wait()
        return await say_hello(server, body)

    server.serve, server.num_awaited = say_nothing, 100
    report = await load(server, "--num", "1", "--timeout", "0.2", code=1)
    assert report["errors"] == {"timeout": 1}


async def test_a_chat_carries_the_answers_so_far_and_a_session(server: Server) -> None:
    flags = ["--api", "chat", "--num", "1", "--turns", "3", "--prefix-tokens", "5", "--suffix-tokens", "2"]
    report = await load(server, *flags)
    assert report["requests"]["succeeded"] == 3
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles[-1] == ["user", "assistant", "user", "assistant", "user"]
    assert server.bodies[2]["messages"][1]["content"] == "hello"
    assert server.bodies[2]["messages"][:3] == server.bodies[1]["messages"]
    assert len({headers["x-session-id"] for headers in server.headers}) == 1


async def test_turns_of_plain_text_go_on_from_the_answer(server: Server) -> None:
    await load(server, "--num", "1", "--turns", "2", "--prefix-tokens", "3", "--suffix-tokens", "2")
    one, two = (body["prompt"] for body in server.bodies)
    assert two.startswith(one + "hello ")
    assert len(two.split()) == len(one.split()) + 2


async def test_keys_are_taken_in_turns_and_are_not_in_the_report(server: Server) -> None:
    report = await load(server, "--num", "4", "--rate", "100", "--api-key", "sk-one", "--api-key", "sk-two")
    keys = sorted(headers["authorization"] for headers in server.headers)
    assert keys == ["Bearer sk-one"] * 2 + ["Bearer sk-two"] * 2
    assert "sk-" not in json.dumps(report)


async def test_extensions_are_sent_where_asked_for(server: Server) -> None:
    flags = ["--num", "1", "--ignore-eos", "--no-usage", "--extra-body", '{"top_k": 5}', "--model", "other"]
    await load(server, *flags)
    (body,) = server.bodies
    assert (body["ignore_eos"], body["top_k"], body["model"]) == (True, 5, "other")
    assert "stream_options" not in body


async def test_a_trace_is_replayed_with_its_lengths(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 40, "input_length": 600, "output_length": 9, "hash_ids": [0, 2]},
        {"timestamp": 60_000, "input_length": 600, "output_length": 9, "hash_ids": [0, 2]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = await load(
        server, "--trace", str(trace), "--duration", "5", "--token-ids", "5", "900", "--speed", "2"
    )
    assert report["requests"]["succeeded"] == 2
    one, two = sorted(server.bodies, key=lambda body: int(body["max_tokens"]))
    assert (len(one["prompt"]), len(two["prompt"]), two["max_tokens"]) == (700, 600, 9)
    assert one["prompt"][:512] == two["prompt"][:512]
    assert one["prompt"][512:] != two["prompt"][512:]


async def test_ctrl_c_gives_the_report_so_far(server: Server, tmp_path: Path) -> None:
    async def answer_the_first_only(server: Server, body: dict[str, Any]) -> Response:
        if len(server.bodies) > 1:
            await server.all_came.wait()
        return await say_hello(server, body)

    server.serve, server.num_awaited = answer_the_first_only, 3
    report_file, records_file = tmp_path / "report.json", tmp_path / "records.jsonl"
    files = ["--output", str(report_file), "--records", str(records_file)]
    process = await start("--url", server.url, "--num", "1", "--turns", "2", *files)
    while len(server.bodies) < 2:
        server.came.clear()
        await server.came.wait()
    process.send_signal(signal.SIGINT)
    out, said = await process.communicate()
    assert process.returncode == 130, said.decode()
    report = json.loads(report_file.read_text())
    assert report["was_stopped"]
    assert (report["requests"]["succeeded"], report["requests"]["cut_off"]) == (1, 1)
    assert b"1 of 2 requests succeeded" in out
    records = [json.loads(line) for line in records_file.read_text().splitlines()]
    assert [record["was_cancelled"] for record in records] == [False, True]


async def test_two_reports_are_compared_by_ratio(server: Server, tmp_path: Path) -> None:
    report = await load(server, "--num", "2", "--rate", "100")
    slower = json.loads(json.dumps(report))
    slower["name"] = "slower"
    slower["time_to_first_token_seconds"]["p99"] = 3 * report["time_to_first_token_seconds"]["p99"]
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file, content in zip(files, (report, slower), strict=True):
        file.write_text(json.dumps(content))
    process = await start("compare", *map(str, files))
    out, said = await process.communicate()
    assert process.returncode == 0, said.decode()
    (line,) = [line for line in out.decode().splitlines() if line.startswith("time to first token, p99")]
    assert line.split()[-1] == "3.000"
    assert "slower" in out.decode()


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--rate", "1"], 2, "how long"),
        (["--rate", "inf", "--duration", "1"], 2, "--num"),
        (["--rate", "0", "--num", "1"], 2, "more than 0"),
        (["--num", "1", "--token-ids", "1", "5"], 2, "--trace"),
        (["--trace", "/no/such/file.jsonl", "--model", "m"], 1, "No such file"),
        (["--url", "http://127.0.0.1:1", "--num", "1"], 1, "is the server up"),
        (["compare", "one.json"], 2, "usage"),
        (["compare", "/no/such.json", "/nor/this.json"], 1, "No such file"),
    ],
)
async def test_what_cannot_be_run_is_said_in_a_line(flags: list[str], code: int, said: str) -> None:
    process = await start(*flags)
    _, err = await process.communicate()
    assert process.returncode == code
    assert said in err.decode()
    assert "Traceback" not in err.decode()
