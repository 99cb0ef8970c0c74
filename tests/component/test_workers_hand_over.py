"""Place, reserve, prefill, hand over, decode: the text is that of one engine alone, and nothing stays."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from workers_mesh import WorkersMesh, prompt_of, running_mesh
from workers_reference import Reference

from libs.bus.messages.generation import Refused, Reserved
from libs.request.outcome import FailureReason, FinishReason, RefusalReason


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


@pytest.fixture
async def reference() -> AsyncIterator[Reference]:
    async with Reference() as reference:
        yield reference


async def test_the_text_is_that_of_a_single_engine_for_prompts_of_every_length(
    mesh: WorkersMesh, reference: Reference
) -> None:
    gateway = await mesh.gateway()
    for start in (mesh.router(), mesh.prefill(), mesh.decode()):
        await start
    generations = [
        gateway.generation(prompt_of(n), max_tokens=6) for n in (1, 3, 4, 5, 16, 31, 32, 33, 64, 150)
    ]
    streams = await asyncio.gather(*map(gateway.begin, generations))
    for generation, stream in zip(generations, streams, strict=True):
        await stream.end()
        expected = await reference.tokens(generation)
        assert stream.tokens == [token.token_id for token in expected]
        assert stream.finish is FinishReason.LENGTH
        assert stream.num_frames == 6
    await mesh.until_idle()


async def test_sampling_logprobs_and_stop_ids_survive_the_hand_over(
    mesh: WorkersMesh, reference: Reference
) -> None:
    gateway = await mesh.gateway()
    for start in (mesh.router(), mesh.prefill(), mesh.decode()):
        await start
    how = {"temperature": 1.3, "seed": 5, "logprobs": 3, "repetition_penalty": 1.2, "max_tokens": 12}
    generation = gateway.generation(prompt_of(41), **how)
    stream = await (await gateway.begin(generation)).end()
    expected = await reference.tokens(generation)
    assert stream.tokens == [token.token_id for token in expected]
    assert [p.top_token_ids for p in stream.logprobs] == [
        t.logprobs.top_token_ids for t in expected if t.logprobs
    ]
    assert [p.logprob for p in stream.logprobs] == pytest.approx(
        [t.logprobs.logprob for t in expected if t.logprobs], abs=1e-5
    )
    for position in (0, 4):
        stopped = await gateway.generate(prompt_of(41), **how, stop_token_ids=(stream.tokens[position],))
        first = stream.tokens.index(stream.tokens[position])
        assert stopped.tokens == stream.tokens[: first + 1]
        assert stopped.finish is FinishReason.STOP
    await mesh.until_idle()


async def test_a_replay_continues_the_text_where_the_first_attempt_was_cut(
    mesh: WorkersMesh, reference: Reference
) -> None:
    gateway = await mesh.gateway()
    for start in (mesh.router(), mesh.prefill(), mesh.decode()):
        await start
    whole = await gateway.generate(prompt_of(20), max_tokens=10, temperature=0.9, seed=3)
    rest = await gateway.generate(
        prompt_of(20), output=whole.tokens[:4], max_tokens=10, temperature=0.9, seed=3
    )
    assert rest.tokens == whole.tokens[4:]


async def test_a_decode_worker_of_both_roles_runs_prompts_itself(
    mesh: WorkersMesh, reference: Reference
) -> None:
    gateway = await mesh.gateway()
    await mesh.router()
    await mesh.decode(role="both")
    generation = gateway.generation(prompt_of(37))
    stream = await (await gateway.begin(generation)).end()
    assert stream.prefill == ""
    assert stream.tokens == [token.token_id for token in await reference.tokens(generation)]
    again = await gateway.generate(prompt_of(37))
    assert again.tokens == stream.tokens
    assert again.num_cached_tokens == 36
    await mesh.until_idle()


async def test_prefix_hits_at_the_prefill_worker_are_told_exactly_and_handed_over_too(
    mesh: WorkersMesh,
) -> None:
    gateway = await mesh.gateway()
    for start in (mesh.router(), mesh.prefill(), mesh.decode("decode-0")):
        await start
    first = await gateway.generate(prompt_of(41))
    decode = await mesh.decode("decode-1")
    second = await gateway.generate(
        prompt_of(41), prefill=mesh.hosted["prefill-0"].incarnation, decode=decode.incarnation
    )
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)
    assert second.tokens == first.tokens


async def test_blocks_that_the_decode_worker_has_are_not_sent_again(mesh: WorkersMesh) -> None:
    gateway = await mesh.gateway()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    first = await gateway.generate(prompt_of(41), **where)
    await mesh.until_idle()
    sent_before = prefill.gauge("kvmesh_kv_transfer_bytes_total", direction="sent")
    longer = prompt_of(41) + first.tokens + prompt_of(6, seed=3)
    second = await gateway.generate(longer, **where)
    await mesh.until_idle()
    assert second.num_cached_blocks == 12
    sent = prefill.gauge("kvmesh_kv_transfer_bytes_total", direction="sent") - sent_before
    assert sent == sent_before * (14 - 12) / 11
    other = await mesh.decode("decode-1")
    fresh = await gateway.generate(longer, prefill=prefill.incarnation, decode=other.incarnation)
    assert (fresh.num_cached_blocks, fresh.tokens) == (0, second.tokens)
    await mesh.until_idle()


async def test_more_blocks_claimed_than_the_decode_worker_has_is_a_failure_not_a_wrong_text(
    mesh: WorkersMesh,
) -> None:
    gateway = await mesh.gateway()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    stream = gateway.listen(gateway.generation(prompt_of(41)))
    reserved = await gateway.reserve(stream.generation, decode.incarnation, prefill.incarnation)
    assert isinstance(reserved, Reserved)
    await gateway.prefill(
        stream.generation, decode.incarnation, prefill.incarnation, reserved.link_address, 99
    )
    assert (await stream.end()).failure is FailureReason.CORRUPT
    await mesh.until_idle()


async def test_streams_aborted_at_any_moment_leave_nothing_and_the_others_are_right(
    mesh: WorkersMesh, reference: Reference
) -> None:
    gateway = await mesh.gateway()
    await mesh.router()
    await mesh.store()
    await mesh.prefill(num_blocks=64)
    await mesh.decode(num_blocks=96)
    chance = random.Random(4)

    async def one(number: int) -> None:
        max_tokens = 200 if number % 2 else 10
        generation = gateway.generation(prompt_of(10 + number, seed=number), max_tokens=max_tokens)
        stream = await gateway.begin(generation)
        if number % 2:
            await asyncio.sleep(chance.random() * 0.05)
            await gateway.abort(stream)
            return
        await stream.end()
        assert stream.tokens == [t.token_id for t in expected[number]]

    expected = {
        number: await reference.tokens(gateway.generation(prompt_of(10 + number, seed=number), max_tokens=10))
        for number in range(0, 60, 2)
    }
    for start in range(0, 60, 12):
        await asyncio.gather(*(one(number) for number in range(start, start + 12)))
    await mesh.until_idle()
    assert mesh.hosted["router-0"].gauge("kvmesh_num_requests_waiting") == 0
    assert mesh.hosted["decode-0"].gauge("kvmesh_generation_tokens_total") < 30 * 200
    await gateway.generate(prompt_of(20))


async def test_a_pool_oversubscribed_four_times_serves_everybody_in_turn(
    mesh: WorkersMesh, reference: Reference
) -> None:
    gateway = await mesh.gateway()
    await mesh.router()
    await mesh.prefill(num_blocks=24)
    await mesh.decode(num_blocks=24)
    generations = [gateway.generation(prompt_of(30, seed=n), max_tokens=8) for n in range(10)]

    async def one(generation: object) -> None:
        stream = await gateway.begin(generation)  # type: ignore[arg-type]  # gathered by index below
        await stream.end()
        assert stream.failure is None

    await asyncio.gather(*(one(generation) for generation in generations))
    for generation in generations:
        expected = await reference.tokens(generation)
        assert gateway.streams[generation.request_id].tokens == [token.token_id for token in expected]
    await mesh.until_idle()


async def test_a_reservation_without_room_or_beyond_the_pool_is_refused_and_holds_nothing(
    mesh: WorkersMesh,
) -> None:
    gateway = await mesh.gateway()
    prefill = await mesh.prefill()
    decode = await mesh.decode(num_blocks=12)
    held = await gateway.reserve(gateway.generation(prompt_of(40)), decode.incarnation, prefill.incarnation)
    assert not isinstance(held, Refused)
    for num_tokens, reason in ((40, RefusalReason.OVERLOADED), (48, RefusalReason.TOO_LONG)):
        answer = await gateway.reserve(
            gateway.generation(prompt_of(num_tokens)), decode.incarnation, prefill.incarnation
        )
        assert isinstance(answer, Refused)
        assert answer.reason is reason
    late = await gateway.reserve(gateway.generation([1], seconds=-1), decode.incarnation, prefill.incarnation)
    assert isinstance(late, Refused)
    assert late.reason is RefusalReason.DEADLINE
    assert decode.gauge("kvmesh_num_requests_held") == 1


async def test_a_draining_worker_ends_what_it_has_and_takes_no_more(mesh: WorkersMesh) -> None:
    gateway = await mesh.gateway()
    await mesh.router()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480))
    await stream.until(2)
    decode.stop.asked.set()
    await mesh.until(lambda: decode.presence.state.value == "draining")
    refused = await gateway.reserve(gateway.generation([1]), decode.incarnation, prefill.incarnation)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING
    await stream.end()
    assert (len(stream.tokens), stream.finish) == (480, FinishReason.LENGTH)
    assert decode.task is not None
    assert await decode.task == 0
    assert await mesh.stop(prefill) == 0
