"""Blocks of finished sequences go to the stores: the next turn of a chat is a hit on any instance."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from memory_bus import MemoryBus
from store_prompts import RUN_TOKENS, Computed, names_of, prompt_on
from tampered_links import tampering
from workers_mesh import BLOCK_SIZE, WorkersMesh, prompt_of, running_mesh

from libs.bus.messages.kv_events import KvEvents, KvSnapshot, Stored, Tier
from libs.kv import layer_groups
from libs.kv.names import split_names
from libs.transport.frames import Fetched, FrameHeader, PutLayer, PutNames
from libs.transport.port import Bytes
from libs.worker.decode import finished_kv

OUTPUT = 30


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


def num_held(mesh: WorkersMesh) -> float:
    return sum(hosted.gauge("kvmesh_store_num_blocks") for hosted in mesh.hosted.values())


def full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE


@pytest.mark.parametrize("piece_bytes", [1, finished_kv.PIECE_BYTES])
async def test_turn_2_of_a_chat_hits_what_decode_put_on_any_instance_and_is_counted_exactly(
    mesh: WorkersMesh, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr(finished_kv, "PIECE_BYTES", piece_bytes)
    gateway = await mesh.gateway()
    for name in ("store-0", "store-1"):
        await mesh.store(name)
    first = {
        "prefill": (await mesh.prefill()).incarnation,
        "decode": (await mesh.decode(store_finished=True)).incarnation,
    }
    prompt = prompt_on(["store-0", "store-1"], RUN_TOKENS + 41)
    turn_1 = await gateway.generate(prompt, max_tokens=OUTPUT, **first)
    num_computed = len(prompt) + OUTPUT - 1
    await mesh.until(lambda: num_held(mesh) == full_blocks(num_computed))
    other, decode = await mesh.prefill("prefill-1"), await mesh.decode("decode-1", store_finished=True)
    second = {"prefill": other.incarnation, "decode": decode.incarnation}
    computed = Computed(other)
    chat = prompt + turn_1.tokens + prompt_of(17, seed=3)
    turn_2 = await gateway.generate(chat, **second)
    assert turn_2.num_cached_tokens == full_blocks(num_computed) * BLOCK_SIZE
    assert computed.num_tokens == len(chat) - turn_2.num_cached_tokens
    cold = await gateway.generate(
        chat, prefill=(await mesh.prefill("prefill-2")).incarnation, decode=first["decode"], cache_salt="x"
    )
    assert (cold.num_cached_tokens, cold.tokens) == (0, turn_2.tokens)
    await mesh.until_idle()


async def test_what_ends_a_sequence_is_told_with_its_last_blocks(mesh: WorkersMesh) -> None:
    told: list[PutNames] = []

    def see(header: FrameHeader, body: Bytes | None) -> bool:
        if isinstance(header, PutNames):
            told.append(header)
        return True

    gateway, _ = await mesh.gateway(), await mesh.store()
    prefill, decode = await mesh.prefill(), await mesh.decode(store_finished=True, wrap=tampering(see))
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.generate(prompt_of(41), max_tokens=OUTPUT, **where)
    await mesh.until(lambda: num_held(mesh) == full_blocks(41 + OUTPUT - 1))
    assert {put.request_id for put in told} == {stream.generation.request_id}
    assert [put.num_output_tokens for put in told] == [0] * (len(told) - 1) + [OUTPUT]
    names = names_of(prompt_of(41) + stream.tokens)
    assert all(put.parent in (b"", *names) for put in told)


@pytest.mark.parametrize(("how", "max_tokens"), [({"store_finished": False}, OUTPUT), ({}, 2)])
async def test_nothing_is_put_where_that_is_switched_off_or_no_block_got_full(
    mesh: WorkersMesh, how: dict[str, Any], max_tokens: int
) -> None:
    gateway, _ = await mesh.gateway(), await mesh.store()
    prefill, decode = await mesh.prefill(), await mesh.decode(**{"store_finished": True, **how})
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    await gateway.generate(prompt_of(41), max_tokens=max_tokens, **where)
    await gateway.generate(prompt_of(40, seed=1), max_tokens=max_tokens, **where)
    await mesh.until(lambda: num_held(mesh) == 20)
    assert decode.gauge("kvmesh_store_put_blocks_total", result="sent") == 0
    await mesh.until_idle()


async def test_a_store_that_takes_nothing_delays_no_token_and_no_end(
    mesh: WorkersMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1)

    def hold(header: FrameHeader, body: Bytes | None) -> Any:
        return asyncio.Event().wait() if isinstance(header, PutLayer) else True

    gateway, store = await mesh.gateway(), await mesh.store()
    prefill, decode = await mesh.prefill(), await mesh.decode(store_finished=True, wrap=tampering(hold))
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    for seed in range(4):
        stream = await gateway.generate(prompt_of(30, seed=seed), max_tokens=OUTPUT, **where)
        assert len(stream.tokens) == OUTPUT
    await mesh.until(lambda: decode.gauge("kvmesh_num_requests_held") == 0)
    await mesh.kill(store)


async def test_an_instance_that_runs_prompts_itself_puts_all_it_computed(mesh: WorkersMesh) -> None:
    gateway, _ = await mesh.gateway(), await mesh.store()
    both = await mesh.decode(role="both", store_finished=True)
    alone = await gateway.generate(prompt_of(41), max_tokens=OUTPUT, decode=both.incarnation)
    await mesh.until(lambda: num_held(mesh) == full_blocks(41 + OUTPUT - 1))
    prefill, decode = await mesh.prefill(), await mesh.decode("decode-1")
    chat = prompt_of(41) + alone.tokens + [3, 4, 5]
    answer = await gateway.generate(chat, prefill=prefill.incarnation, decode=decode.incarnation)
    assert answer.num_cached_tokens == full_blocks(41 + OUTPUT - 1) * BLOCK_SIZE
    await mesh.until_idle()


@pytest.mark.parametrize("is_cut", [False, True])
async def test_an_instance_that_runs_prompts_itself_hits_what_others_put(
    mesh: WorkersMesh, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    monkeypatch.setattr(layer_groups, "FRAME_BYTES", 1)

    def hold_last(header: FrameHeader, body: Bytes | None) -> Any:
        is_last = is_cut and isinstance(header, Fetched) and header.layer == 2
        return asyncio.Event().wait() if is_last else True

    gateway, store = await mesh.gateway(), await mesh.store(wrap=tampering(hold_last))
    prefill, decode = await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    first = await gateway.generate(prompt_of(41), **where)
    await mesh.until(lambda: num_held(mesh) == 10)
    both = await mesh.decode("decode-1", role="both", store_fetch_timeout_seconds=0.5 if is_cut else 10.0)
    await mesh.until(lambda: both.gauge("kvmesh_num_links") == 2)  # of the prefill worker, and its own
    async with asyncio.timeout(10):
        alone = await gateway.generate(prompt_of(41), decode=both.incarnation)
    assert alone.tokens == first.tokens
    result = "failed" if is_cut else "hit"
    assert both.gauge("kvmesh_store_lookups_total", result=result) == 1
    assert is_cut or alone.num_cached_tokens == 40
    assert both.gauge("kvmesh_prefix_cache_hits_total") == alone.num_cached_tokens
    assert both.service.load().fetch_cost is not None
    await mesh.kill(store)
    await mesh.until_idle()


async def test_both_kinds_of_worker_tell_which_blocks_their_pools_hold(mesh: WorkersMesh) -> None:
    heard: dict[str, set[bytes]] = {}
    bus = MemoryBus(mesh.broker)

    def hear(message: KvEvents) -> None:
        stored = [event for event in message.events if isinstance(event, Stored)]
        assert all(event.tier is Tier.DEVICE for event in stored)
        for event in stored:
            heard.setdefault(message.publisher, set()).update(split_names(event.names))

    await bus.subscribe(KvEvents, hear)
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.generate(prompt_of(41), max_tokens=OUTPUT, **where)
    names = names_of(prompt_of(41) + stream.tokens[:-1])
    await mesh.until(lambda: heard.get(decode.incarnation) == set(names))
    await mesh.until(lambda: heard.get(prefill.incarnation) == set(names[:10]))
    page = await bus.request(KvSnapshot(), to=decode.incarnation, timeout_seconds=5)
    assert {name for stored in page.stored for name in split_names(stored.names)} == set(names)
    await bus.close()
