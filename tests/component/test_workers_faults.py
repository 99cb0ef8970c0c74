"""What breaks on the way: each attempt ends at once with the right reason, and everything it held is free."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest
from tampered_links import tampering
from workers_mesh import Gateway, Hosted, WorkersMesh, prompt_of, running_mesh

from libs.bus.messages.generation import Queued, Refused, Reserved
from libs.request.outcome import FailureReason, RefusalReason
from libs.transport.frames import FrameHeader, HandOver, LayerBlocks
from libs.transport.port import Bytes


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


async def pair(mesh: WorkersMesh, **prefill: Any) -> tuple[Gateway, Hosted, Hosted]:
    gateway = await mesh.gateway()
    return gateway, await mesh.prefill(**prefill), await mesh.decode()


async def test_a_link_that_is_cut_fails_what_waits_for_it_and_the_next_request_makes_a_new_one(
    mesh: WorkersMesh,
) -> None:
    seen = asyncio.Event()

    def hold_hand_over(header: FrameHeader, body: Bytes | None) -> bool:
        is_last = isinstance(header, HandOver)
        if is_last:
            seen.set()
        return not is_last or may_hand_over

    may_hand_over = False
    gateway, prefill, decode = await pair(mesh, wrap=tampering(hold_hand_over))
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    streams = [await gateway.begin(gateway.generation(prompt_of(50, seed=n)), **where) for n in range(3)]
    await seen.wait()
    mesh.network.drop_links()
    for stream in streams:
        await asyncio.wait_for(stream.end(), 10)
        assert stream.failure is FailureReason.PEER_LOST
    await mesh.until_idle()
    may_hand_over = True
    assert len((await gateway.generate(prompt_of(50), **where)).tokens) == 8


async def test_running_sequences_do_not_notice_that_their_prefill_worker_dies(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=60), **where)
    await stream.until(2)
    await mesh.kill(prefill)
    await stream.end()
    assert (len(stream.tokens), stream.failure) == (60, None)


@pytest.mark.usefixtures("layer_by_layer")
@pytest.mark.parametrize("nth", [0, 4])
async def test_a_flipped_bit_is_seen_never_decoded_and_the_retry_is_right(
    mesh: WorkersMesh, nth: int
) -> None:
    num_seen = 0

    def flip_nth(header: FrameHeader, body: Bytes | None) -> bool:
        nonlocal num_seen
        if isinstance(header, LayerBlocks) and body is not None:
            if num_seen == nth:
                body[body.size // 2] ^= 16
            num_seen += 1
        return True

    gateway, prefill, decode = await pair(mesh, wrap=tampering(flip_nth))
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    corrupt = await gateway.generate(prompt_of(50), **where)
    assert corrupt.failure is FailureReason.CORRUPT
    assert corrupt.tokens == []
    await mesh.until_idle()
    retried = await gateway.generate(prompt_of(50), **where)
    whole = await gateway.generate(prompt_of(50), **where)
    assert retried.tokens == whole.tokens
    assert len(whole.tokens) == 8


@pytest.mark.usefixtures("layer_by_layer")
async def test_a_hand_over_with_blocks_missing_is_not_adopted(mesh: WorkersMesh) -> None:
    def lose_layer_1(header: FrameHeader, body: Bytes | None) -> bool:
        return not (isinstance(header, LayerBlocks) and header.layer == 1)

    gateway, prefill, decode = await pair(mesh, wrap=tampering(lose_layer_1))
    stream = await gateway.generate(prompt_of(21), prefill=prefill.incarnation, decode=decode.incarnation)
    assert stream.failure is FailureReason.CORRUPT
    assert "6 blocks" in stream.detail
    await mesh.until_idle()


async def test_leases_follow_the_clock_and_frames_of_their_own_sequence(mesh: WorkersMesh) -> None:
    skipped_seconds = 0.0
    gateway = await mesh.gateway()
    decode = await mesh.decode(lease_seconds=10.0, clock=lambda: time.time() + skipped_seconds)
    old = gateway.listen(gateway.generation(prompt_of(50), seconds=100.0))
    await gateway.reserve(old.generation, decode.incarnation, "silent")
    skipped_seconds = 9.0
    new = gateway.listen(gateway.generation(prompt_of(50), seconds=100.0))
    await gateway.reserve(new.generation, decode.incarnation, "silent")
    assert decode.gauge("kvmesh_num_requests_held") == 2
    skipped_seconds = 10.5
    last = gateway.listen(gateway.generation(prompt_of(9), seconds=100.0))
    await gateway.reserve(last.generation, decode.incarnation, "silent")
    assert (await old.end()).failure is FailureReason.LEASE_EXPIRED
    assert decode.gauge("kvmesh_num_requests_held") == 2
    assert not new.ended.is_set()


async def test_a_reservation_that_nobody_fills_is_freed_when_its_lease_ends(mesh: WorkersMesh) -> None:
    gateway = await mesh.gateway()
    decode = await mesh.decode(lease_seconds=1.0)
    stream = gateway.listen(gateway.generation(prompt_of(50)))
    await gateway.reserve(stream.generation, decode.incarnation, "a-prefill-worker-that-never-speaks")
    assert decode.gauge("kvmesh_num_requests_held") == 1
    await stream.end()
    assert stream.failure is FailureReason.LEASE_EXPIRED
    await mesh.until_idle()


async def test_a_prompt_that_waits_long_for_its_turn_keeps_its_lease(mesh: WorkersMesh) -> None:
    gate = asyncio.Event()

    def hold_blocks(header: FrameHeader, body: Bytes | None) -> bool | Awaitable[object]:
        return gate.wait() if isinstance(header, LayerBlocks) else True

    gateway = await mesh.gateway()
    prefill = await mesh.prefill(wrap=tampering(hold_blocks), lease_seconds=1.0)
    decode = await mesh.decode(lease_seconds=1.0)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    streams = [await gateway.begin(gateway.generation(prompt_of(30, seed=n)), **where) for n in range(2)]
    await asyncio.sleep(2.5)
    assert not any(stream.ended.is_set() for stream in streams)
    gate.set()
    for stream in streams:
        assert (await stream.end()).failure is None


async def test_a_gateway_that_is_gone_takes_its_sequences_with_it(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    other = await mesh.gateway("gateway-1")
    stays = await other.begin(other.generation(prompt_of(9), max_tokens=50), **where)
    for number in range(3):
        stream = await gateway.begin(gateway.generation(prompt_of(30, seed=number), max_tokens=400), **where)
    await stream.until(1)
    mesh.tasks[0].cancel()
    await gateway.bus.delete_presence(gateway.incarnation)
    await stays.end()
    assert len(stays.tokens) == 50
    await mesh.until_idle()
    assert decode.gauge("kvmesh_generation_tokens_total") < 3 * 400


async def test_an_abort_frees_a_running_sequence_at_once(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(9), max_tokens=490), **where)
    await stream.until(2)
    await gateway.abort(stream)
    await mesh.until_idle()
    assert decode.gauge("kvmesh_generation_tokens_total") < 490


async def test_load_reports_name_what_has_ended_and_was_told_but_not_what_nobody_wants(
    mesh: WorkersMesh,
) -> None:
    now = [time.time()]
    gateway, prefill = await mesh.gateway(), await mesh.prefill()
    decode = await mesh.decode(clock=lambda: now[0])
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    whole = await gateway.generate(prompt_of(20), **where)
    aborted = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=500), **where)
    await gateway.abort(aborted)
    await mesh.until_idle()
    expired = gateway.generation(prompt_of(20))
    expired = msgspec.structs.replace(expired, deadline_unix_seconds=now[0] + 1.0)
    gateway.listen(expired)
    await gateway.reserve(expired, decode.incarnation, prefill.incarnation)
    assert decode.load().ended_request_ids == (whole.generation.request_id,)
    now[0] += 1.5
    decode.service.decode.expire()
    assert decode.load().ended_request_ids == (whole.generation.request_id, expired.request_id)
    now[0] += 10.0
    assert decode.load().ended_request_ids == ()


@pytest.mark.parametrize("is_gateway_gone", [False, True])
async def test_a_prompt_on_its_way_is_freed_by_an_abort_and_with_its_gateway(
    mesh: WorkersMesh, is_gateway_gone: bool
) -> None:
    held_back = asyncio.Event()

    def hold_blocks(header: FrameHeader, body: Bytes | None) -> bool | Awaitable[object]:
        held_back.set()
        return asyncio.Event().wait() if isinstance(header, LayerBlocks) else True

    gateway, prefill, decode = await pair(mesh, wrap=tampering(hold_blocks))
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(50)), **where)
    await held_back.wait()
    assert prefill.gauge("kvmesh_num_requests_held") == 1
    if is_gateway_gone:
        mesh.tasks[0].cancel()
        await gateway.bus.delete_presence(gateway.incarnation)
    else:
        await gateway.abort(stream)
    await mesh.until_idle()


async def test_what_was_aborted_before_it_came_is_not_taken_in(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    stream = gateway.listen(gateway.generation(prompt_of(20)))
    stream.prefill, stream.decode = prefill.incarnation, decode.incarnation
    await gateway.abort(stream)
    for refused in (
        await gateway.reserve(stream.generation, decode.incarnation, prefill.incarnation),
        await gateway.prefill(stream.generation, decode.incarnation, prefill.incarnation, ""),
    ):
        assert isinstance(refused, Refused), refused
        assert "aborted" in refused.detail
    assert decode.gauge("kvmesh_num_requests_held") == prefill.gauge("kvmesh_num_requests_held") == 0


async def test_a_prefill_worker_that_leaves_before_it_made_a_link_is_not_waited_for(
    mesh: WorkersMesh,
) -> None:
    gateway, prefill, decode = await pair(mesh)
    stream = gateway.listen(gateway.generation(prompt_of(50)))
    await gateway.reserve(stream.generation, decode.incarnation, prefill.incarnation)
    await mesh.stop(prefill)
    await asyncio.wait_for(stream.end(), 10)
    assert stream.failure is FailureReason.PEER_LOST
    await mesh.until_idle()


async def test_a_link_to_a_decode_worker_that_left_the_mesh_is_closed(mesh: WorkersMesh) -> None:
    _, prefill, decode = await pair(mesh)
    await mesh.until(lambda: prefill.gauge("kvmesh_num_links") == 1)
    decode.bus.disconnect()
    await mesh.until(lambda: prefill.gauge("kvmesh_num_links") == 0)


async def test_a_deadline_ends_a_sequence_wherever_it_is(mesh: WorkersMesh) -> None:
    skipped_seconds = 0.0
    gateway, prefill = await mesh.gateway(), await mesh.prefill()
    decode = await mesh.decode(clock=lambda: time.time() + skipped_seconds)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    running = await gateway.begin(gateway.generation(prompt_of(9), max_tokens=490, seconds=30.0), **where)
    await running.until(2)
    skipped_seconds = 60.0
    awaited = gateway.listen(gateway.generation(prompt_of(9), seconds=61.0))
    await gateway.reserve(awaited.generation, decode.incarnation, "nobody")
    for stream in (awaited, running):
        await stream.end()
        assert stream.failure is FailureReason.DEADLINE
    await mesh.until_idle()


async def test_a_decode_worker_out_of_reach_fails_the_prompt_from_the_prefill_worker(
    mesh: WorkersMesh,
) -> None:
    gateway, prefill = await mesh.gateway(), await mesh.prefill()
    for address in ("memory://127.0.0.1:999", ""):
        stream = gateway.listen(gateway.generation(prompt_of(30)))
        queued = await gateway.prefill(stream.generation, "nobody", prefill.incarnation, address)
        assert isinstance(queued, Queued)
        await stream.end()
        assert stream.failure is FailureReason.PEER_LOST
    await mesh.until_idle()


async def test_an_address_that_another_incarnation_answers_is_not_used(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    stream = gateway.listen(gateway.generation(prompt_of(30)))
    await gateway.prefill(
        stream.generation, "the-one-before", prefill.incarnation, decode.presence.link_address
    )
    await stream.end()
    assert stream.failure is FailureReason.PEER_LOST


async def test_kv_from_a_peer_that_was_not_asked_is_not_taken(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    other = await mesh.prefill("prefill-1")
    stream = gateway.listen(gateway.generation(prompt_of(30)))
    reserved = await gateway.reserve(stream.generation, decode.incarnation, prefill.incarnation)
    assert isinstance(reserved, Reserved)
    await gateway.prefill(stream.generation, decode.incarnation, other.incarnation, reserved.link_address)
    await mesh.until(lambda: other.gauge("kvmesh_num_requests_held") == 0)
    assert stream.num_frames == 0
    await gateway.prefill(stream.generation, decode.incarnation, prefill.incarnation, reserved.link_address)
    assert len((await stream.end()).tokens) == 8


async def test_tokens_made_while_the_broker_is_away_arrive_after_it(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480), **where)
    await stream.until(3)
    decode.bus.disconnect()
    await mesh.until(lambda: decode.gauge("kvmesh_num_unsent_deltas") > 50)
    decode.bus.reconnect()
    await stream.end()
    assert (len(stream.tokens), stream.failure) == (480, None)
    await mesh.until_idle()


async def test_asking_twice_is_the_same_as_asking_once(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh)
    generation = gateway.generation(prompt_of(20))
    stream = gateway.listen(generation)
    first = await gateway.reserve(generation, decode.incarnation, prefill.incarnation)
    assert await gateway.reserve(generation, decode.incarnation, prefill.incarnation) == first
    assert isinstance(first, Reserved)
    for _ in range(2):
        await gateway.prefill(generation, decode.incarnation, prefill.incarnation, first.link_address)
    assert len((await stream.end()).tokens) == 8
    await mesh.until_idle()


async def test_a_full_prefill_queue_refuses(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await pair(mesh, max_waiting=1)
    first, second = gateway.generation(prompt_of(20)), gateway.generation(prompt_of(20))
    answers = await asyncio.gather(
        *(
            gateway.prefill(generation, decode.incarnation, prefill.incarnation, "memory://nowhere")
            for generation in (first, second)
        )
    )
    assert isinstance(answers[0], Queued)
    assert isinstance(answers[1], Refused)
    assert answers[1].reason is RefusalReason.OVERLOADED


async def test_a_decode_worker_that_runs_no_prompts_says_so(mesh: WorkersMesh) -> None:
    gateway = await mesh.gateway()
    decode = await mesh.decode()
    refused = await gateway.reserve(gateway.generation([1, 2]), decode.incarnation, "")
    assert isinstance(refused, Refused)
    assert "give it the role both" in refused.detail
