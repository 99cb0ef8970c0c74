"""The KV store between workers: hits are exact, and everything that can go wrong with it is a miss."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from store_prompts import names_of
from tampered_links import tampering
from workers_mesh import BLOCK_SIZE, Gateway, Hosted, WorkersMesh, prompt_of, running_mesh

from libs.transport.frames import Fetched, FrameHeader, PutLayer
from libs.transport.port import Bytes


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


async def warm(mesh: WorkersMesh, num_tokens: int, **store: Any) -> tuple[Gateway, Hosted, Hosted, list[int]]:
    """A store that holds the blocks of one prompt, and what its answer was."""
    gateway, held = await mesh.gateway(), await mesh.store(**store)
    prefill, decode = await mesh.prefill(), await mesh.decode()
    first = await gateway.generate(
        prompt_of(num_tokens), prefill=prefill.incarnation, decode=decode.incarnation
    )
    await mesh.until(lambda: held.gauge("kvmesh_store_num_blocks") == num_tokens // BLOCK_SIZE)
    assert first.num_cached_tokens == 0
    return gateway, held, decode, first.tokens


@pytest.mark.parametrize(("num_tokens", "num_cached"), [(41, 40), (40, 36), (43, 40), (5, 4), (150, 148)])
async def test_a_prefix_computed_by_one_worker_is_a_hit_at_another(
    mesh: WorkersMesh, num_tokens: int, num_cached: int
) -> None:
    gateway, _, decode, tokens = await warm(mesh, num_tokens)
    other = await mesh.prefill("prefill-1")
    second = await gateway.generate(
        prompt_of(num_tokens), prefill=other.incarnation, decode=decode.incarnation
    )
    assert second.tokens == tokens
    assert second.num_cached_tokens == num_cached
    assert other.gauge("kvmesh_prefix_cache_hits_total") == num_cached
    assert other.gauge("kvmesh_prefix_cache_queries_total") == num_tokens
    await mesh.until_idle()


async def test_the_next_turn_of_a_chat_hits_what_the_first_one_left_and_adds_the_rest(
    mesh: WorkersMesh,
) -> None:
    gateway, store, decode, _ = await warm(mesh, 40)
    other = await mesh.prefill("prefill-1")
    longer = prompt_of(40) + prompt_of(33, seed=9)
    second = await gateway.generate(longer, prefill=other.incarnation, decode=decode.incarnation)
    assert second.num_cached_tokens == 40
    await mesh.until(lambda: store.gauge("kvmesh_store_num_blocks") == 73 // BLOCK_SIZE)
    third = await mesh.prefill("prefill-2")
    again = await gateway.generate(longer, prefill=third.incarnation, decode=decode.incarnation)
    assert (again.num_cached_tokens, again.tokens) == (72, second.tokens)
    assert store.gauge("kvmesh_store_puts_total", result="held") == 2


async def test_another_salt_shares_nothing(mesh: WorkersMesh) -> None:
    gateway, store, decode, tokens = await warm(mesh, 40)
    prefill = mesh.hosted["prefill-0"]
    generation = gateway.generation(prompt_of(40))
    salted = type(generation)(
        **{f: getattr(generation, f) for f in generation.__struct_fields__} | {"cache_salt": "x"}
    )
    stream = await gateway.begin(salted, prefill=prefill.incarnation, decode=decode.incarnation)
    await stream.end()
    assert (stream.num_cached_tokens, stream.tokens) == (0, tokens)
    await mesh.until(lambda: store.gauge("kvmesh_store_num_blocks") == 20)


async def test_a_dead_store_is_a_miss_and_its_successor_is_used(mesh: WorkersMesh) -> None:
    gateway, store, decode, tokens = await warm(mesh, 41)
    other = await mesh.prefill("prefill-1")
    await mesh.kill(store)
    where = {"prefill": other.incarnation, "decode": decode.incarnation}
    second = await gateway.generate(prompt_of(41), **where)
    assert (second.num_cached_tokens, second.tokens) == (0, tokens)
    successor = await mesh.store("store-1")
    await mesh.until_linked(other, successor)
    peers = other.service.stores._peers
    await mesh.until(lambda: len(peers) == 1)
    await gateway.generate(prompt_of(61), **where)
    await mesh.until(lambda: successor.gauge("kvmesh_store_num_blocks") == 15)
    await mesh.until_idle()


@pytest.mark.usefixtures("layer_by_layer")
async def test_a_store_that_dies_while_it_sends_is_a_miss(mesh: WorkersMesh) -> None:
    dying: list[asyncio.Task[None]] = []

    def die_after_layer_0(header: FrameHeader, body: Bytes | None) -> bool:
        if isinstance(header, Fetched) and header.layer == 1:
            dying.append(asyncio.create_task(mesh.kill(mesh.hosted["store-0"])))
        return not dying

    gateway, _, decode, tokens = await warm(mesh, 41, wrap=tampering(die_after_layer_0))
    other = await mesh.prefill("prefill-1")
    second = await gateway.generate(prompt_of(41), prefill=other.incarnation, decode=decode.incarnation)
    assert (second.num_cached_tokens, second.tokens) == (0, tokens)
    assert other.gauge("kvmesh_store_lookups_total", result="failed") == 1
    await dying[0]
    await mesh.until_idle()


@pytest.mark.usefixtures("layer_by_layer")
async def test_fetched_kv_with_a_flipped_bit_is_computed_instead(mesh: WorkersMesh) -> None:
    def flip(header: FrameHeader, body: Bytes | None) -> bool:
        if isinstance(header, Fetched) and header.layer == 2 and body is not None:
            body[9] ^= 1
        return True

    gateway, store, decode, tokens = await warm(mesh, 41, wrap=tampering(flip))
    other = await mesh.prefill("prefill-1")
    second = await gateway.generate(prompt_of(41), prefill=other.incarnation, decode=decode.incarnation)
    assert (second.num_cached_tokens, second.tokens) == (0, tokens)
    assert other.gauge("kvmesh_store_lookups_total", result="corrupt") == 1
    # The store's own bytes are right, so it keeps them.
    await mesh.until(lambda: store.gauge("kvmesh_store_rechecked_blocks_total", result="right") == 10)
    assert store.gauge("kvmesh_store_num_blocks") == 10
    await mesh.until_idle()


async def test_a_block_that_went_bad_in_the_stores_memory_costs_one_prompt_its_hit_and_then_is_replaced(
    mesh: WorkersMesh,
) -> None:
    gateway, store, decode, tokens = await warm(mesh, 41)
    blocks = store.service._store.blocks
    node = blocks.tree.node_of(names_of(prompt_of(41))[6])
    (piece,) = blocks.slab.pieces(blocks.tree.slot[node : node + 1], range(1))
    piece.data[0, 0, 5] ^= 1
    others = [await mesh.prefill(f"prefill-{n}") for n in (1, 2, 3)]
    num_cached: list[int] = []
    for other in others:
        answer = await gateway.generate(prompt_of(41), prefill=other.incarnation, decode=decode.incarnation)
        assert answer.tokens == tokens
        num_cached.append(answer.num_cached_tokens)
        left = 6 if other is others[0] else 10
        await mesh.until(lambda left=left: store.gauge("kvmesh_store_num_blocks") == left)
    assert num_cached == [0, 24, 40]
    assert store.gauge("kvmesh_store_rechecked_blocks_total", result="dropped") == 4
    await mesh.until_idle()


@pytest.mark.usefixtures("layer_by_layer")
async def test_a_put_with_a_flipped_bit_is_never_held(mesh: WorkersMesh) -> None:
    def flip(header: FrameHeader, body: Bytes | None) -> bool:
        if isinstance(header, PutLayer) and header.layer == 1 and body is not None:
            body[9] ^= 1
        return True

    gateway, store = await mesh.gateway(), await mesh.store()
    prefill, decode = await mesh.prefill(wrap=tampering(flip)), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    await gateway.generate(prompt_of(41), **where)
    await mesh.until(lambda: store.gauge("kvmesh_store_puts_total", result="corrupt") == 1)
    assert store.gauge("kvmesh_store_num_blocks") == 0
    await mesh.until_idle()


async def test_a_store_smaller_than_what_is_put_keeps_the_latest_and_stays_within_its_budget(
    mesh: WorkersMesh,
) -> None:
    block_bytes = 3 * 2 * 2 * BLOCK_SIZE * 8 * 4
    gateway, store = await mesh.gateway(), await mesh.store(memory_gib=12 * block_bytes / (1 << 30))
    prefill, decode = await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    for seed in range(4):
        stream = await gateway.generate(prompt_of(21, seed=seed), **where)
        assert stream.failure is None
        await mesh.until(lambda seed=seed: store.gauge("kvmesh_store_puts_total", result="held") == seed + 1)
    assert store.gauge("kvmesh_store_num_blocks") <= 12
    assert store.gauge("kvmesh_store_evicted_blocks_total") >= 8
    refused = await gateway.generate(prompt_of(100), **where)
    assert refused.failure is None
    await mesh.until(lambda: store.gauge("kvmesh_store_puts_total", result="refused") == 1)
    await mesh.until_idle()


async def test_puts_beyond_their_budget_are_dropped_and_counted(mesh: WorkersMesh) -> None:
    gateway, store = await mesh.gateway(), await mesh.store()
    prefill, decode = await mesh.prefill(store_put_mib=0), await mesh.decode()
    await gateway.generate(prompt_of(41), prefill=prefill.incarnation, decode=decode.incarnation)
    await mesh.until(lambda: prefill.gauge("kvmesh_store_put_blocks_total", result="dropped") == 10)
    assert store.gauge("kvmesh_store_num_blocks") == 0
