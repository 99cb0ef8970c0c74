"""What a client can do wrong, and what the mesh can answer no to: 4xx and 5xx in one shape."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_mesh import MODEL, Mesh, running_gateway, stay_silent
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.generation import Refused, TokenDelta
from libs.request.generation import Generation
from libs.request.outcome import FailureReason, RefusalReason

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 2}


@pytest.fixture
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    broker = MemoryBroker()
    async with running_gateway(MemoryBus(broker), MemoryBus(broker), **getattr(request, "param", {})) as mesh:
        yield mesh


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", [settings], indirect=True, ids=[",".join(settings)])


def assert_shape(body: Any, *, code: str | None = None, param: str | None = None) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if code is not None:
        assert body["error"]["code"] == code
    if param is not None:
        assert body["error"]["param"] == param


BAD_CHATS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "gpt-17"}, 404, "model_not_found"),
    ({"model": None}, 400, None),
    ({"messages": []}, 400, None),
    ({"messages": None}, 400, None),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        None,
    ),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400, "context_length_exceeded"),
    ({"max_tokens": 0}, 400, None),
    ({"max_tokens": 10**40}, 400, None),
    ({"max_tokens": 8193}, 400, None),
    ({"temperature": -1}, 400, None),
    ({"temperature": "hot"}, 400, None),
    ({"n": 10_000}, 400, None),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, None),
    ({"stop": ""}, 400, None),
    ({"logit_bias": {"49152": 1}}, 400, None),
    ({"logit_bias": {"5": 1, "05": 2}}, 400, None),
    ({"session_id": 7}, 400, None),
    ({"logprobs": False, "top_logprobs": 3}, 400, None),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, 400, "unsupported_parameter"),
    ({"response_format": {"type": "json_schema"}}, 400, "unsupported_parameter"),
    ({"no_such_field": 1}, 400, "unknown_parameter"),
]
BAD_TEXTS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": ""}, 400, None),
    ({"prompt": []}, 400, None),
    ({"prompt": [[]]}, 400, None),
    ({"prompt": [49152]}, 400, None),
    ({"prompt": [-1]}, 400, None),
    ({"prompt": [1, "x"]}, 400, None),
    ({"prompt": {"a": 1}}, 400, None),
    ({"prompt": ["x"] * 100, "n": 16}, 400, None),
    ({"best_of": 3}, 400, None),
    ({"suffix": "x"}, 400, None),
    ({"echo": True, "logprobs": 1}, 400, None),
    ({"logprobs": 21}, 400, None),
]


async def test_bad_parameters_are_400_by_name_and_the_next_request_is_served(mesh: Mesh) -> None:
    async with mesh.http() as http:
        for path, good, table in (
            ("/v1/chat/completions", CHAT, BAD_CHATS),
            ("/v1/completions", TEXT, BAD_TEXTS),
        ):
            for change, status, code in table:
                for stream in (False, True):
                    answer = await http.post(path, json={**good, **change, "stream": stream})
                    assert answer.status_code == status, (change, answer.text)
                    assert_shape(answer.json(), code=code)
            assert (await http.post(path, json=good)).status_code == 200


async def test_options_of_a_stream_are_refused_where_none_is_asked_for(mesh: Mesh) -> None:
    options = {"stream_options": {"include_usage": True}}
    async with mesh.http() as http:
        for path, good in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            for change in ({}, {"stream": False}, {"stream": None}):
                answer = await http.post(path, json={**good, **options, **change})
                assert answer.status_code == 400
                assert_shape(answer.json(), param="stream_options")
            assert (await http.post(path, json={**good, **options, "stream": True})).status_code == 200


NO_HTTP = [
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: many\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"hello\r\n\r\n",
    b"GET /live HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET /l\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
]


async def test_what_is_no_http_is_refused_in_the_same_shape(mesh: Mesh) -> None:
    host, port = mesh.url.removeprefix("http://").split(":")
    for request in NO_HTTP:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        async with asyncio.timeout(10):
            head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 "), request
        assert b"content-type: application/json" in head
        assert f"content-length: {len(body)}".encode() in head
        assert_shape(json.loads(body), code="invalid_http")
    async with mesh.http() as http:
        assert (await http.get("/live")).status_code == 200


NO_JSON = [
    (b"", "application/json", 400),
    (b"{", "application/json", 400),
    (b"[1]", "application/json", 400),
    (b'{"model": "\xff"}', "application/json", 400),
    (b'{"model": "\\ud800", "messages": []}', "application/json; charset=utf-8", 400),
    (b'{"temperature": NaN}', "application/json", 400),
    (b'{"messages": ' + b"[" * 50_000, "application/json", 400),
    (b"a=b", "application/x-www-form-urlencoded", 415),
    (b"{}", "text/plain", 415),
]


async def test_bodies_that_are_no_json_are_refused(mesh: Mesh) -> None:
    async with mesh.http() as http:
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            for body, content_type, status in NO_JSON:
                answer = await http.post(path, content=body, headers={"content-type": content_type})
                assert answer.status_code == status, body[:40]
                assert_shape(answer.json())


@with_settings(max_body_bytes=2000)
async def test_a_body_over_the_limit_is_413_and_names_it(mesh: Mesh) -> None:
    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    async with mesh.http() as http:
        announced = await http.post("/v1/completions", json={**TEXT, "prompt": "x" * 3000})
        unannounced = await http.post(
            "/v1/completions", content=in_pieces(), headers={"content-type": "application/json"}
        )
    for answer in (announced, unannounced):
        assert answer.status_code == 413
        assert_shape(answer.json())
        assert "2000" in answer.json()["error"]["message"]


async def test_unknown_paths_and_methods_have_the_same_shape(mesh: Mesh) -> None:
    async with mesh.http() as http:
        missing = await http.get("/v1/nothing")
        wrong = await http.get("/v1/chat/completions")
        model = await http.get("/v1/models/no/such")
    assert (missing.status_code, wrong.status_code, model.status_code) == (404, 405, 404)
    assert wrong.headers["allow"] == "POST"
    for answer in (missing, wrong, model):
        assert_shape(answer.json())
    assert model.json()["error"]["code"] == "model_not_found"


@with_settings(api_key=("one", "two"))
async def test_with_keys_only_those_who_show_one_are_served(mesh: Mesh) -> None:
    async with mesh.http() as http:
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            answer = await http.post("/v1/completions", json=TEXT, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert_shape(answer.json(), code="invalid_api_key")
        good = await http.post("/v1/completions", json=TEXT, headers={"authorization": "Bearer two"})
        assert good.status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/live")).status_code == 200


ROUTER_REFUSALS = {
    RefusalReason.OVERLOADED: 429,
    RefusalReason.NO_WORKERS: 503,
    RefusalReason.TOO_LONG: 400,
    RefusalReason.DEADLINE: 504,
}


async def test_what_the_router_refuses_becomes_a_status_even_for_a_stream(mesh: Mesh) -> None:
    async with mesh.http() as http:
        for reason, status in ROUTER_REFUSALS.items():
            for stream in (False, True):
                mesh.place_answers = [Refused(reason=reason, detail="why", retry_after_seconds=2.5)]
                answer = await http.post("/v1/completions", json={**TEXT, "stream": stream})
                assert answer.status_code == status
                assert_shape(answer.json())
                assert "why" in answer.json()["error"]["message"]
                assert answer.headers.get("retry-after") == ("3" if status in (429, 503) else None)


async def test_a_full_worker_is_left_for_another(mesh: Mesh) -> None:
    mesh.decodes[0].reserve_answer = Refused(reason=RefusalReason.OVERLOADED)
    second = await mesh.add(mesh.decodes[0].presence.kind, "decode-1")
    async with mesh.http() as http:
        assert (await http.post("/v1/completions", json=TEXT)).status_code == 200
    assert [place.exclude for place in mesh.places] == [(), ("decode-0-i",)]
    assert len(second.generations) == 1
    assert len(mesh.unplaced) == 1


async def test_a_mesh_that_stays_full_is_a_429(mesh: Mesh) -> None:
    mesh.prefills[0].prefill_answer = Refused(reason=RefusalReason.OVERLOADED, detail="queue full")
    mesh.decodes[0].behaviour = stay_silent
    async with mesh.http() as http:
        answer = await http.post("/v1/completions", json=TEXT)
    assert answer.status_code == 429
    assert_shape(answer.json(), code="overloaded")
    assert sorted(set(mesh.decodes[0].aborted)) == sorted(g.request_id for g in mesh.decodes[0].generations)


@with_settings(max_concurrent_requests=1)
async def test_beyond_the_concurrency_limit_it_is_429(mesh: Mesh) -> None:
    mesh.decodes[0].behaviour = stay_silent
    async with mesh.http() as http:
        first = asyncio.create_task(http.post("/v1/completions", json=TEXT))
        await mesh.decodes[0].came_to_rest.wait()
        second = await http.post("/v1/completions", json=TEXT)
        assert (second.status_code, second.headers["retry-after"]) == (429, "1")
        assert_shape(second.json(), code="overloaded")
        assert (await http.get("/v1/models")).status_code == 200
        first.cancel()


@with_settings(request_timeout_seconds=0.3)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_is_a_504_and_frees_the_worker(mesh: Mesh, stream: bool) -> None:
    mesh.decodes[0].behaviour = stay_silent
    async with mesh.http() as http:
        answer = await http.post("/v1/completions", json={**TEXT, "stream": stream})
    assert answer.status_code == 504
    assert_shape(answer.json(), code="deadline_exceeded")
    async with asyncio.timeout(5):
        await mesh.decodes[0].saw_abort.wait()


async def test_an_internal_failure_of_a_worker_is_a_500_and_not_tried_again(mesh: Mesh) -> None:
    async def fail(worker: Any, generation: Generation) -> None:
        delta = TokenDelta(generation.request_id, 0, (), failure=FailureReason.INTERNAL, detail="boom")
        await worker.send(generation, delta)

    mesh.decodes[0].behaviour = fail
    async with mesh.http() as http:
        answer = await http.post("/v1/completions", json=TEXT)
    assert answer.status_code == 500
    assert_shape(answer.json())
    assert "boom" in answer.json()["error"]["message"]
    assert len(mesh.decodes[0].generations) == 1


async def test_a_prompt_too_large_for_the_broker_is_a_413_naming_both_sizes() -> None:
    broker = MemoryBroker(max_payload_bytes=4096)
    async with running_gateway(MemoryBus(broker), MemoryBus(broker)) as mesh, mesh.http() as http:
        answer = await http.post("/v1/completions", json={**TEXT, "prompt": "word " * 2000})
        assert answer.status_code == 413
        assert "4096" in answer.json()["error"]["message"]
