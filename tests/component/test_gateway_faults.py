"""Clients that leave, workers that die, frames that get lost: one outcome each, and nothing stays held."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from gateway_mesh import MODEL, Mesh, Worker, running_gateway, say, say_part, stay_silent, words
from memory_broker import MemoryBroker
from memory_bus import MemoryBus

from libs.bus.messages.generation import TokenDelta
from libs.bus.messages.presence import ServiceKind
from libs.cost.load import WorkerLoad
from libs.request.generation import Generation, num_tokens
from libs.request.outcome import RETRYABLE, FailureReason, FinishReason

TEXT = "The quick brown fox jumps over the lazy dog and runs away."
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 100, "stream": True}


@pytest.fixture
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    broker = MemoryBroker()
    gateway_bus = MemoryBus(broker)
    async with running_gateway(gateway_bus, MemoryBus(broker), **getattr(request, "param", {})) as mesh:
        mesh.gateway_bus = gateway_bus
        yield mesh


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mesh", [settings], indirect=True, ids=[",".join(settings)])


async def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def stream_text(mesh: Mesh, **change: Any) -> tuple[str, list[Any]]:
    """The text of a stream, and its events."""
    async with mesh.http() as http, http.stream("POST", "/v1/completions", json={**BODY, **change}) as answer:
        got = await events(answer)
    return "".join(e["choices"][0]["text"] for e in got if e != "[DONE]" and e.get("choices")), got


async def test_a_worker_lost_in_mid_stream_is_replaced_and_the_text_goes_on_once(mesh: Mesh) -> None:
    first, second = mesh.decodes[0], await mesh.add(ServiceKind.DECODE_WORKER, "decode-1")
    first.behaviour, second.behaviour = say_part(TEXT, 4), say(TEXT)
    streaming = asyncio.create_task(stream_text(mesh))
    await first.came_to_rest.wait()
    await first.die()
    text, got = await streaming
    assert text == TEXT
    assert got[-1] == "[DONE]"
    old, new = first.generations[0], second.generations[0]
    assert new.request_id != old.request_id
    assert new.num_prompt_tokens == old.num_prompt_tokens
    assert len(new.token_ids) == len(old.token_ids) + 4 * 4
    assert new.sampling == old.sampling
    assert mesh.places[-1].exclude == ("decode-0-i",)


async def test_a_worker_that_falls_silent_is_lost_after_its_presence_expires(mesh: Mesh) -> None:
    first, second = mesh.decodes[0], await mesh.add(ServiceKind.DECODE_WORKER, "decode-1")
    first.behaviour, second.behaviour = say_part(TEXT, 4), say(TEXT)
    streaming = asyncio.create_task(stream_text(mesh))
    await first.came_to_rest.wait()
    first.is_dead = True
    assert (await streaming)[0] == TEXT


async def test_a_prefill_worker_lost_before_the_first_token_is_replaced(mesh: Mesh) -> None:
    decode, second = mesh.decodes[0], await mesh.add(ServiceKind.PREFILL_WORKER, "prefill-1")
    decode.behaviour = stay_silent
    streaming = asyncio.create_task(stream_text(mesh))
    await decode.came_to_rest.wait()
    decode.behaviour = say(TEXT)
    await mesh.prefills[0].die()
    assert (await streaming)[0] == TEXT
    assert second.prompts == [decode.generations[1].request_id]
    assert decode.aborted == [decode.generations[0].request_id]


@with_settings(replay="off")
async def test_with_replay_off_a_lost_worker_is_one_error_event_and_the_end(mesh: Mesh) -> None:
    first = mesh.decodes[0]
    await mesh.add(ServiceKind.DECODE_WORKER, "decode-1")
    first.behaviour = say_part(TEXT, 4)
    streaming = asyncio.create_task(stream_text(mesh))
    await first.came_to_rest.wait()
    await first.die()
    _, got = await streaming
    assert set(got[-1]) == {"error"}
    assert got[-1]["error"]["code"] == "peer_lost"
    assert sum("error" in event for event in got) == 1
    assert not any(e["choices"][0]["finish_reason"] for e in got[:-1])


async def test_a_lost_frame_is_noticed_by_its_gap_and_made_good(mesh: Mesh) -> None:
    tokens = words(TEXT)

    async def lose_one(worker: Worker, generation: Generation) -> None:
        worker.behaviour = say(TEXT)
        await worker.give(generation, 0, tokens[:2])
        await worker.give(generation, 3, tokens[3:4])
        worker.came_to_rest.set()

    mesh.decodes[0].behaviour = lose_one
    text, _ = await stream_text(mesh)
    assert text == TEXT
    first, second = mesh.decodes[0].generations
    assert len(second.token_ids) == len(first.token_ids) + 2 * 4
    assert mesh.decodes[0].aborted == [first.request_id]


async def test_late_frames_of_an_abandoned_attempt_match_nothing_and_are_aborted_again(mesh: Mesh) -> None:
    worker, tokens = mesh.decodes[0], words(TEXT)
    worker.behaviour = say(TEXT)
    await stream_text(mesh)
    old = worker.generations[0]
    assert worker.aborted == []
    await worker.give(old, 0, tokens[:1])
    async with asyncio.timeout(5):
        await worker.saw_abort.wait()
    assert worker.aborted == [old.request_id]
    assert await mesh.metric("kvmesh_stale_deltas_total") == 1


async def test_a_lost_last_frame_is_noticed_when_the_worker_says_that_it_is_idle(mesh: Mesh) -> None:
    worker = mesh.decodes[0]
    worker.behaviour = say_part(TEXT, 4)
    streaming = asyncio.create_task(stream_text(mesh))
    await worker.came_to_rest.wait()
    worker.behaviour = say(TEXT)
    while not streaming.done():
        await worker.report(WorkerLoad(num_blocks=10))
        await asyncio.wait({streaming}, timeout=0.25)
    assert (await streaming)[0] == TEXT


async def test_a_lost_last_frame_is_noticed_when_a_busy_worker_says_that_it_has_ended(mesh: Mesh) -> None:
    worker = mesh.decodes[0]
    worker.behaviour = say_part(TEXT, 4)
    streaming = asyncio.create_task(stream_text(mesh))
    await worker.came_to_rest.wait()
    worker.behaviour = say(TEXT)
    (lost,) = worker.generations
    num_reports = 0
    while not streaming.done():
        await worker.report(WorkerLoad(num_running=3, ended_request_ids=(lost.request_id,)))
        num_reports += 1
        await asyncio.wait({streaming}, timeout=0.25)
    assert (await streaming)[0] == TEXT
    assert num_reports <= 3
    assert [num_tokens(generation) - generation.num_prompt_tokens for generation in worker.generations] == [
        0,
        4,
    ]


async def test_retryable_failures_are_tried_again_at_most_three_times(mesh: Mesh) -> None:
    worker = mesh.decodes[0]
    for reason in RETRYABLE:

        async def fail(worker: Worker, generation: Generation, reason: FailureReason = reason) -> None:
            delta = TokenDelta(generation.request_id, 0, (), failure=reason, detail="why")
            await worker.send(generation, delta)

        worker.behaviour, worker.generations = fail, []
        async with mesh.http() as http:
            answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == reason.value
        assert len({g.request_id for g in worker.generations}) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_has_its_sequence_aborted_everywhere(mesh: Mesh, stream: bool) -> None:
    worker = mesh.decodes[0]
    worker.behaviour = say_part(TEXT, 3)
    async with mesh.http() as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": stream}))
        await worker.came_to_rest.wait()
        asking.cancel()
        await asyncio.wait({asking})
    async with asyncio.timeout(5):
        await worker.saw_abort.wait()
        await mesh.prefills[0].saw_abort.wait()
        await mesh.saw_unplace.wait()
    request_id = worker.generations[0].request_id
    assert (worker.aborted, mesh.prefills[0].aborted, mesh.unplaced) == ([request_id],) * 3
    assert await mesh.metric("kvmesh_num_requests_running") == 0
    assert await mesh.metric('kvmesh_request_failure_total{reason="aborted"}') == 1


async def test_a_client_that_leaves_while_queued_is_taken_from_the_queue(mesh: Mesh) -> None:
    mesh.holds_places = True
    async with mesh.http() as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await mesh.saw_place.wait()
        asking.cancel()
        await asyncio.wait({asking})
    async with asyncio.timeout(5):
        await mesh.saw_unplace.wait()
    assert mesh.unplaced == [mesh.places[0].request_id]


async def test_hundreds_of_streams_dropped_at_any_moment_leave_nothing_behind(mesh: Mesh) -> None:
    mesh.decodes[0].behaviour = say(TEXT)

    async def ask_and_leave(number: int) -> None:
        async with mesh.http() as http:
            asking = asyncio.create_task(
                http.post("/v1/completions", json={**BODY, "stream": bool(number % 2)})
            )
            await asyncio.wait({asking}, timeout=(number % 40) / 1000)
            asking.cancel()
            await asyncio.wait({asking})

    for _ in range(4):
        await asyncio.gather(*(ask_and_leave(number) for number in range(40)))
    async with asyncio.timeout(5):
        while await mesh.metric("kvmesh_http_requests_in_flight"):  # noqa: ASYNC110  (as Prometheus does)
            await asyncio.sleep(0.01)
    assert await mesh.metric("kvmesh_num_requests_waiting") == 0
    assert await mesh.metric("kvmesh_num_requests_running") == 0
    assert (await stream_text(mesh))[0] == TEXT


@with_settings(max_buffered_bytes=8192, flush_timeout_seconds=0.5)
async def test_a_client_that_does_not_read_is_cut_off_with_bounded_memory(mesh: Mesh) -> None:
    worker = mesh.decodes[0]

    async def pour(worker: Worker, generation: Generation) -> None:
        token = words(" word")
        for index in range(generation.sampling.max_tokens):
            await worker.give(generation, index, token)

    worker.behaviour = pour
    reader, writer = await asyncio.open_connection("127.0.0.1", int(mesh.url.rpartition(":")[2]), limit=1024)
    body = json.dumps({**BODY, "max_tokens": 8000, "logprobs": 20}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    head += "connection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    async with asyncio.timeout(20):
        await worker.saw_abort.wait()
    assert await mesh.metric("kvmesh_slow_clients_total") >= 1
    async with asyncio.timeout(10):
        rest = await reader.read(-1)
    assert b"[DONE]" not in rest
    writer.close()


async def test_a_router_that_leaves_while_requests_queue_there_is_asked_again(mesh: Mesh) -> None:
    mesh.holds_places = True
    streaming = asyncio.create_task(stream_text(mesh))
    await mesh.saw_place.wait()
    mesh.holds_places = False
    mesh.decodes[0].behaviour = say(TEXT)
    await mesh.bus.delete_presence("r0")
    assert (await streaming)[0] == TEXT
    assert mesh.unplaced[0] == mesh.places[0].request_id


async def test_a_broker_that_is_away_for_a_moment_delays_a_request(mesh: Mesh) -> None:
    bus = mesh.gateway_bus
    assert isinstance(bus, MemoryBus)
    mesh.decodes[0].behaviour = say(TEXT)
    bus.disconnect()
    streaming = asyncio.create_task(stream_text(mesh))
    await asyncio.wait({streaming}, timeout=0.6)
    assert not streaming.done()
    bus.reconnect()
    assert (await streaming)[0] == TEXT


async def test_draining_lets_what_is_in_progress_end_and_refuses_the_rest(mesh: Mesh) -> None:
    worker, go_on = mesh.decodes[0], asyncio.Event()

    async def wait_then_say(worker: Worker, generation: Generation) -> None:
        await worker.give(generation, 0, words(TEXT)[:1])
        worker.came_to_rest.set()
        await go_on.wait()
        for index, token in enumerate(words(TEXT)[1:], 1):
            await worker.give(generation, index, [token])
        await worker.send(
            generation, TokenDelta(generation.request_id, len(words(TEXT)), (), finish=FinishReason.LENGTH)
        )

    worker.behaviour = wait_then_say
    streaming = asyncio.create_task(stream_text(mesh))
    await worker.came_to_rest.wait()
    assert mesh.stop is not None
    mesh.stop.asked.set()
    async with mesh.http() as http:
        async with asyncio.timeout(5):
            while (await http.get("/ready")).status_code != 503:  # noqa: ASYNC110  (as a load balancer does)
                await asyncio.sleep(0.01)
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    go_on.set()
    text, got = await streaming
    assert (text, got[-1]) == (TEXT, "[DONE]")


@with_settings(drain_timeout_seconds=0.2)
async def test_what_does_not_end_within_the_drain_gets_an_error_event(mesh: Mesh) -> None:
    worker = mesh.decodes[0]
    worker.behaviour = say_part(TEXT, 2)
    streaming = asyncio.create_task(stream_text(mesh))
    await worker.came_to_rest.wait()
    assert mesh.stop is not None
    mesh.stop.asked.set()
    _, got = await streaming
    assert "shutting down" in got[-1]["error"]["message"]
