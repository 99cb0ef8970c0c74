"""KV arrives from a store while the prompt computes: layer by layer, and what does not come is computed."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from store_prompts import Computed
from tampered_links import tampering
from workers_mesh import BLOCK_SIZE, Gateway, Hosted, WorkersMesh, prompt_of, running_mesh
from workers_reference import Reference

from libs.bus.messages.generation import Refused
from libs.request.outcome import RefusalReason
from libs.transport.frames import Fetched, FrameHeader, LayerBlocks
from libs.transport.port import Bytes

NUM_TOKENS, NUM_CACHED = 81, 80
LAST_LAYER = 2
pytestmark = pytest.mark.usefixtures("layer_by_layer")


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


class Gate:
    """Holds a store's frames of one layer back, and sees what leaves the prefill worker meanwhile."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.opened, self.reached = asyncio.Event(), asyncio.Event()
        self.left: list[int] = []
        self.left_layer = asyncio.Event()

    def hold(self, header: FrameHeader, body: Bytes | None) -> bool | Awaitable[object]:
        if isinstance(header, Fetched) and header.layer == self._layer:
            self.reached.set()
            return self.opened.wait()
        return True

    def see(self, header: FrameHeader, body: Bytes | None) -> bool:
        if isinstance(header, LayerBlocks):
            self.left.append(header.layer)
            self.left_layer.set()
        return True


async def warm(
    mesh: WorkersMesh, gate: Gate, **other: Any
) -> tuple[Gateway, Hosted, dict[str, str], list[int]]:
    """A store that holds a prompt, and a worker that does not."""
    gateway, store = await mesh.gateway(), await mesh.store(wrap=tampering(gate.hold))
    first, decode = await mesh.prefill(), await mesh.decode()
    where = {"prefill": first.incarnation, "decode": decode.incarnation}
    answer = await gateway.generate(prompt_of(NUM_TOKENS), **where)
    await mesh.until(lambda: store.gauge("kvmesh_store_num_blocks") == NUM_TOKENS // BLOCK_SIZE)
    fresh = await mesh.decode("decode-1")
    prefill = await mesh.prefill("prefill-1", wrap=tampering(gate.see), **other)
    return gateway, prefill, {"prefill": prefill.incarnation, "decode": fresh.incarnation}, answer.tokens


async def test_the_first_layers_are_computed_and_leave_before_the_last_one_has_come(
    mesh: WorkersMesh,
) -> None:
    gate = Gate(LAST_LAYER)
    gateway, prefill, where, tokens = await warm(mesh, gate, store_fetch_timeout_seconds=20.0)
    stream = await gateway.begin(gateway.generation(prompt_of(NUM_TOKENS)), **where)
    async with asyncio.timeout(10):
        await gate.reached.wait()
        await gate.left_layer.wait()
    assert LAST_LAYER not in gate.left
    assert not stream.ended.is_set()
    gate.opened.set()
    await stream.end()
    assert (stream.tokens, stream.num_cached_tokens) == (tokens, NUM_CACHED)
    assert prefill.gauge("kvmesh_store_lookups_total", result="hit") == 1
    await mesh.until_idle()


async def test_another_prompt_runs_while_one_waits_for_its_kv(mesh: WorkersMesh) -> None:
    gate = Gate(1)
    gateway, _, where, tokens = await warm(mesh, gate, store_fetch_timeout_seconds=20.0)
    waiting = await gateway.begin(gateway.generation(prompt_of(NUM_TOKENS)), **where)
    await gate.reached.wait()
    other = await gateway.generate(prompt_of(33, seed=5), **where)
    assert len(other.tokens) == 8
    assert not waiting.ended.is_set()
    gate.opened.set()
    assert (await waiting.end()).tokens == tokens
    await mesh.until_idle()


async def test_prompts_that_begin_alike_share_one_fetch(mesh: WorkersMesh) -> None:
    gate = Gate(0)
    gateway, _, where, _ = await warm(mesh, gate, store_fetch_timeout_seconds=20.0)
    prompts = [[*prompt_of(NUM_TOKENS)[:NUM_CACHED], last] for last in range(1, 6)]
    streams = [await gateway.begin(gateway.generation(prompt), **where) for prompt in prompts]
    await gate.reached.wait()
    await asyncio.sleep(0.05)  # the others come to know of it, or fetch themselves
    gate.opened.set()
    for stream in streams:
        assert (await stream.end()).num_cached_tokens == NUM_CACHED
    await mesh.until_idle()
    assert mesh.hosted["store-0"].gauge("kvmesh_store_fetches_total", result="sent") == 1
    async with Reference() as reference:
        for prompt, stream in zip(prompts, streams, strict=True):
            expected = await reference.tokens(gateway.generation(prompt))
            assert stream.tokens == [token.token_id for token in expected]
    await mesh.until_idle()


async def test_prompts_that_begin_alike_share_one_put(mesh: WorkersMesh) -> None:
    gateway, store = await mesh.gateway(), await mesh.store()
    prefill, decode = await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    prompts = [[*prompt_of(NUM_TOKENS)[:NUM_CACHED], last] for last in range(1, 6)]
    await asyncio.gather(*(gateway.generate(prompt, **where) for prompt in prompts))
    await mesh.until(lambda: store.gauge("kvmesh_store_num_blocks") == NUM_CACHED // BLOCK_SIZE)
    await mesh.until_idle()
    sent = prefill.gauge("kvmesh_store_put_blocks_total", result="sent")
    assert sent == NUM_CACHED // BLOCK_SIZE


async def test_a_prompt_waits_for_the_fetch_of_another_no_longer_than_that_takes(mesh: WorkersMesh) -> None:
    gate = Gate(1)
    gateway, prefill, where, _ = await warm(mesh, gate, store_fetch_timeout_seconds=0.3)
    prompts = [[*prompt_of(NUM_TOKENS)[:NUM_CACHED], last] for last in range(1, 4)]
    async with asyncio.timeout(8):
        answers = await asyncio.gather(*(gateway.generate(prompt, **where) for prompt in prompts))
    assert [len(answer.tokens) for answer in answers] == [8, 8, 8]
    assert prefill.gauge("kvmesh_num_requests_held") == 0
    gate.opened.set()
    await mesh.until_idle()


@pytest.mark.parametrize("layer", [0, 1, LAST_LAYER])
async def test_a_prompt_whose_kv_stops_coming_is_begun_again_and_its_frames_do_not_mix(
    mesh: WorkersMesh, layer: int
) -> None:
    gate = Gate(layer)
    gateway, prefill, where, tokens = await warm(mesh, gate, store_fetch_timeout_seconds=0.3)
    computed = Computed(prefill)
    async with asyncio.timeout(10):
        answer = await gateway.generate(prompt_of(NUM_TOKENS), **where)
    assert answer.tokens == tokens
    assert prefill.gauge("kvmesh_store_lookups_total", result="failed") == 1
    assert computed.num_tokens == NUM_TOKENS - answer.num_cached_tokens
    gate.opened.set()
    await mesh.until_idle()
    longer = [*prompt_of(NUM_TOKENS), 5, 6, 7, 8]
    again = await gateway.generate(longer, **where)
    assert again.num_cached_tokens == NUM_CACHED  # its own blocks, whole and findable
    await mesh.until_idle()


async def test_a_prompt_that_is_begun_again_gives_way_to_one_that_waited_for_its_room(
    mesh: WorkersMesh,
) -> None:
    gate = Gate(1)
    num_blocks = NUM_TOKENS // BLOCK_SIZE + 4
    gateway, prefill, where, tokens = await warm(
        mesh, gate, store_fetch_timeout_seconds=0.5, num_blocks=num_blocks
    )
    fetching = await gateway.begin(gateway.generation(prompt_of(NUM_TOKENS)), **where)
    await gate.reached.wait()
    waiting = await gateway.begin(gateway.generation(prompt_of(NUM_TOKENS, seed=5)), **where)
    async with asyncio.timeout(8):
        assert (await fetching.end()).tokens == tokens
        assert len((await waiting.end()).tokens) == 8
    assert prefill.gauge("kvmesh_store_lookups_total", result="failed") == 1
    gate.opened.set()
    await mesh.until_idle()


@pytest.mark.parametrize("layer", [0, LAST_LAYER])
async def test_an_abort_while_kv_is_on_its_way_leaves_nothing(mesh: WorkersMesh, layer: int) -> None:
    gate = Gate(layer)
    gateway, _, where, tokens = await warm(mesh, gate, store_fetch_timeout_seconds=20.0)
    stream = await gateway.begin(gateway.generation(prompt_of(NUM_TOKENS)), **where)
    await gate.reached.wait()
    await gateway.abort(stream)
    await mesh.until_idle()
    gate.opened.set()
    answer = await gateway.generate(prompt_of(NUM_TOKENS), **where)
    assert (answer.tokens, answer.num_cached_tokens) == (tokens, NUM_CACHED)
    await mesh.until_idle()


async def test_a_lost_decode_link_ends_a_prompt_whose_kv_is_on_its_way_at_once(mesh: WorkersMesh) -> None:
    gate = Gate(1)
    gateway, prefill, where, _ = await warm(mesh, gate, store_fetch_timeout_seconds=20.0)
    stream = await gateway.begin(gateway.generation(prompt_of(NUM_TOKENS)), **where)
    await gate.reached.wait()
    await mesh.kill(mesh.hosted["decode-1"])
    await mesh.until(lambda: prefill.gauge("kvmesh_num_requests_held") == 0)
    await asyncio.wait_for(stream.end(), 10)
    gate.opened.set()
    await mesh.until_idle()


async def test_a_prompt_beyond_the_worker_is_refused_as_too_long(mesh: WorkersMesh) -> None:
    gateway, decode = await mesh.gateway(), await mesh.decode()
    by_pool = await mesh.prefill(num_blocks=8)
    by_model = await mesh.prefill("prefill-1")
    for prefill, fits, too_long in ((by_pool, 31, 32), (by_model, 511, 512)):
        generation = gateway.generation(prompt_of(too_long))
        answer = await gateway.prefill(
            generation, decode.incarnation, prefill.incarnation, decode.presence.link_address
        )
        assert isinstance(answer, Refused)
        assert answer.reason is RefusalReason.TOO_LONG
        where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
        assert len((await gateway.generate(prompt_of(fits), max_tokens=1, **where)).tokens) == 1
    await mesh.until_idle()
