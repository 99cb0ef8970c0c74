"""Several KV stores: one prompt over all of them, and whatever becomes of one costs hits, never answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from memory_bus import MemoryBus
from memory_transport import any_transport
from store_prompts import RUN_TOKENS, Computed, names_of, prompt_on
from tampered_links import tampering
from workers_mesh import BLOCK_SIZE, Gateway, Hosted, WorkersMesh, prompt_of, running_mesh

from libs.bus.messages.presence import Presence, ServiceKind, ServiceState
from libs.bus.messages.store import FindPrefix, PrefixHeld
from libs.cost.fetch import FetchCost
from libs.kv.access_trace import hash_ids, read_requests
from libs.kv.runs import runs_by_store
from libs.transport.frames import Fetched, FrameHeader
from libs.transport.port import Bytes
from libs.worker.stores import circuit_breaker
from libs.worker.stores.stores import PromptAsked

STORES = ("store-0", "store-1")
NUM_TOKENS = 3 * RUN_TOKENS + 50
pytestmark = pytest.mark.usefixtures("layer_by_layer")


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


class Scene:
    """Two stores that hold one prompt between them, and a worker that never saw it."""

    def __init__(self, mesh: WorkersMesh, gateway: Gateway, decode: Hosted, other: Hosted) -> None:
        self.mesh, self.gateway, self.decode, self.other = mesh, gateway, decode, other
        self.prompt: list[int] = []
        self.tokens: list[int] = []

    def where(self, prefill: Hosted | None = None) -> dict[str, str]:
        return {
            "prefill": (prefill or self.other).incarnation,
            "decode": self.decode.incarnation,
        }

    def lookups(self, result: str) -> float:
        return self.other.gauge("kvmesh_store_lookups_total", result=result)


async def scene(
    mesh: WorkersMesh, runs_on: list[str], *, wrap: dict[str, Any] | None = None, **other: Any
) -> Scene:
    gateway, decode = await mesh.gateway(), await mesh.decode()
    stores = [await mesh.store(name, wrap=(wrap or {}).get(name)) for name in STORES]
    first = await mesh.prefill("prefill-0")
    made = Scene(mesh, gateway, decode, await mesh.prefill("prefill-1", **other))
    made.prompt = prompt_on(runs_on, NUM_TOKENS)
    answer = await gateway.generate(made.prompt, **made.where(first))
    made.tokens = answer.tokens
    await mesh.until(
        lambda: sum(s.gauge("kvmesh_store_num_blocks") for s in stores) == NUM_TOKENS // BLOCK_SIZE
    )
    await mesh.stop(decode)
    made.decode = await mesh.decode("decode-1")
    return made


def each(store: str, tamper: Callable[[Fetched, Bytes], Any]) -> dict[str, Any]:
    """Tamper with what one store sends."""

    def show(header: FrameHeader, body: Bytes | None) -> Any:
        return tamper(header, body) if isinstance(header, Fetched) and body is not None else True

    return {store: tampering(show)}


SPREAD = ["store-0", "store-1", "store-1", "store-0"]


async def test_a_prompt_over_two_stores_is_one_hit_and_what_was_not_cached_was_computed(
    mesh: WorkersMesh,
) -> None:
    made = await scene(mesh, SPREAD)
    computed = Computed(made.other)
    answer = await made.gateway.generate(made.prompt, **made.where())
    assert answer.tokens == made.tokens
    assert answer.num_cached_tokens == (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert computed.num_tokens == NUM_TOKENS - answer.num_cached_tokens
    assert made.lookups("hit") == 1
    stores = [mesh.hosted[name] for name in STORES]
    await mesh.until(lambda: [s.gauge("kvmesh_store_fetches_total", result="sent") for s in stores] == [1, 1])
    await mesh.until_idle()


async def test_a_store_that_dies_while_it_sends_costs_only_its_part(mesh: WorkersMesh) -> None:
    dying: list[asyncio.Task[None]] = []

    def die_after_layer_0(header: Fetched, body: Bytes) -> bool:
        if header.layer == 1 and not dying:
            dying.append(asyncio.create_task(mesh.kill(mesh.hosted["store-1"])))
        return not dying

    made = await scene(
        mesh, ["store-0", "store-1", "store-1", "store-1"], wrap=each("store-1", die_after_layer_0)
    )
    answer = await made.gateway.generate(made.prompt, **made.where())
    assert answer.tokens == made.tokens
    assert answer.num_cached_tokens == RUN_TOKENS  # what came whole from the other store
    assert made.lookups("failed") == 1
    await dying[0]
    again = await made.gateway.generate([*made.prompt, 7], **made.where())
    assert again.failure is None
    await mesh.until_idle()


async def test_a_corrupt_layer_of_one_store_is_computed_and_the_text_is_right(mesh: WorkersMesh) -> None:
    def flip(header: Fetched, body: Bytes) -> bool:
        if header.layer == 2:
            body[body.size // 3] ^= 4
        return True

    made = await scene(mesh, SPREAD, wrap=each("store-0", flip))
    answer = await made.gateway.generate(made.prompt, **made.where())
    assert answer.tokens == made.tokens
    assert made.lookups("corrupt") == 1
    await mesh.until_idle()


async def test_a_store_that_sends_no_more_holds_a_prompt_up_for_its_short_patience_alone(
    mesh: WorkersMesh,
) -> None:
    made = await scene(
        mesh, SPREAD, wrap=each("store-1", lambda header, body: header.layer == 0 or asyncio.Event().wait())
    )
    async with asyncio.timeout(15):
        answer = await made.gateway.generate(made.prompt, **made.where())
    assert answer.tokens == made.tokens
    assert answer.num_cached_tokens == RUN_TOKENS  # what came whole from the other store
    assert made.lookups("failed") == 1
    await made.mesh.kill(mesh.hosted["store-1"])
    await mesh.until_idle()


async def silent_store(mesh: WorkersMesh, name: str) -> list[FindPrefix]:
    """A store that hears questions and answers none."""
    asked: list[FindPrefix] = []

    async def hear(question: FindPrefix) -> PrefixHeld:
        asked.append(question)
        await asyncio.Event().wait()
        raise AssertionError("it never answers")

    bus = MemoryBus(mesh.broker)
    await bus.serve(FindPrefix, hear, at=name)
    transport = any_transport("memory", name, b"secret", network=mesh.network)
    listener = await transport.listen("127.0.0.1")
    presence = Presence(
        kind=ServiceKind.KV_STORE,
        name=name,
        incarnation=name,
        state=ServiceState.READY,
        link_address=listener.address,
    )

    async def beat() -> None:
        while True:
            await bus.put_presence(name, msgspec.msgpack.encode(presence))
            await asyncio.sleep(0.5)

    mesh.tasks.append(asyncio.create_task(beat()))
    return asked


async def test_a_store_that_does_not_answer_is_asked_once_and_then_left_alone_for_a_while(
    mesh: WorkersMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_SECONDS", circuit_breaker.LONGEST_PAUSE_SECONDS)
    asked = await silent_store(mesh, "store-1")
    gateway, prefill = await mesh.gateway(), await mesh.prefill(store_find_timeout_seconds=0.1)
    decode = await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    await mesh.until(lambda: prefill.gauge("kvmesh_num_links") == 2)
    for seed in range(6):
        assert (await gateway.generate(prompt_of(30, seed=seed), **where)).failure is None
    assert len(asked) == 1
    assert prefill.gauge("kvmesh_store_lookups_total", result="failed") == 6
    assert prefill.gauge("kvmesh_store_put_blocks_total", result="sent") == 0


async def test_a_restarted_store_is_a_new_one_under_its_old_name_and_gets_its_runs_again(
    mesh: WorkersMesh,
) -> None:
    made = await scene(mesh, SPREAD)
    old = mesh.hosted["store-1"]
    await mesh.kill(old)
    new = await mesh.store("store-1")
    await mesh.until_linked(made.other, new)
    answer = await made.gateway.generate(made.prompt, **made.where())
    assert answer.tokens == made.tokens
    assert answer.num_cached_tokens == RUN_TOKENS  # up to the first run that is lost
    await mesh.until(lambda: new.gauge("kvmesh_store_num_blocks") == 2 * RUN_TOKENS / BLOCK_SIZE)
    third = await mesh.prefill("prefill-2")
    whole = await made.gateway.generate(made.prompt, **made.where(third))
    assert (whole.tokens, whole.num_cached_tokens) == (
        made.tokens,
        (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE,
    )
    await mesh.until_idle()


async def test_a_new_store_takes_over_some_runs_which_are_then_computed_and_put_there(
    mesh: WorkersMesh,
) -> None:
    made = await scene(mesh, SPREAD)
    new = await mesh.store("store-2")
    await mesh.until_linked(made.other, new)
    answer = await made.gateway.generate(made.prompt, **made.where())
    assert answer.tokens == made.tokens
    taken = runs_by_store(names_of(made.prompt), (*STORES, "store-2"))["store-2"]
    assert answer.num_cached_tokens == taken[0].start * BLOCK_SIZE
    await mesh.until(lambda: new.gauge("kvmesh_store_num_blocks") == sum(map(len, taken)))
    await mesh.until_idle()


async def test_traces_of_two_stores_give_the_prompt_in_its_order(mesh: WorkersMesh, tmp_path: Path) -> None:
    stores = [await mesh.store(name, access_trace=f"{tmp_path}/") for name in STORES]
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    prompt = prompt_on(["store-1", "store-0", "store-1", "store-0"], NUM_TOKENS)
    await gateway.generate(prompt, prefill=prefill.incarnation, decode=decode.incarnation)
    for store in stores:
        await mesh.stop(store)
    (request,) = read_requests([tmp_path / f"{name}.jsonl" for name in STORES])
    assert request.hash_ids == hash_ids(names_of(prompt))


async def test_a_store_that_leaves_just_before_it_is_asked_holds_nothing(mesh: WorkersMesh) -> None:
    await mesh.store()
    stores = (await mesh.prefill()).service.stores
    await mesh.until(lambda: stores.are_there)
    finding = asyncio.ensure_future(stores.find(names_of(prompt_of(30)), PromptAsked(), timeout_seconds=1.0))
    await asyncio.sleep(0)  # it is chosen now, and asked in the next turn of the loop
    stores.set_stores([])
    found = await finding
    assert (found.num_held, found.is_answered) == (0, False)


async def test_a_hit_that_costs_more_than_to_compute_is_computed(mesh: WorkersMesh) -> None:
    made = await scene(mesh, SPREAD, store_fetch_when="faster")
    estimator = made.other.service.stores._estimator
    estimator.cost = FetchCost(latency_seconds=30.0, bytes_per_second=1.0)
    computed = Computed(made.other)
    answer = await made.gateway.generate(made.prompt, **made.where())
    assert (answer.tokens, answer.num_cached_tokens) == (made.tokens, 0)
    assert computed.num_tokens == NUM_TOKENS
    assert made.lookups("recompute") == 1
    load = made.other.service.load()
    assert load.fetch_cost == estimator.cost
    assert load.prefill_cost is not None
