"""The router and what holders tell: real workers and a store whose KV it hears of; two routers at once."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
from workers_mesh import BLOCK_SIZE, Gateway, Hosted, WorkersMesh, prompt_of, running_mesh

from libs.bus.messages.generation import Place, Placed, Refused
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.kv.names import block_names

PREFILL, DECODE = ServiceKind.PREFILL_WORKER, ServiceKind.DECODE_WORKER


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


def names_of(worker: Hosted, prompt: Sequence[int]) -> bytes:
    fingerprint = worker.presence.model_fingerprint.rpartition("-")[0]
    return b"".join(block_names(prompt, BLOCK_SIZE, fingerprint, ""))


async def place(
    gateway: Gateway, request_id: str, num_tokens: int = 15, names: bytes = b"", **more: object
) -> Placed:
    message = Place(
        request_id=request_id,
        num_tokens=num_tokens,
        max_new_tokens=4,
        deadline_unix_seconds=time.time() + 20.0,
        names=names,
        **more,  # type: ignore[arg-type]  # kwargs of the tests
    )
    answer = await gateway.bus.request(message, timeout_seconds=20)
    assert isinstance(answer, Placed), answer
    return answer


def decided(router: Hosted, kind: str) -> float:
    return router.gauge("kvmesh_router_decisions_total", kind=kind)


async def test_a_prompt_goes_where_its_prefix_is_and_elsewhere_once_that_worker_is_dead(
    mesh: WorkersMesh,
) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    await mesh.store()
    workers = [await mesh.prefill("prefill-0"), await mesh.prefill("prefill-1")]
    await mesh.decode()
    prompt = prompt_of(120)
    first = await gateway.generate(prompt)
    holder = next(worker for worker in workers if worker.incarnation == first.prefill)
    names = names_of(holder, prompt)
    async with asyncio.timeout(10):  # the worker tells of its pool within a moment
        number = 0
        while decided(router, "local") == 0:
            number += 1
            again = await place(gateway, f"again-{number}", 120, names)
    assert again.prefill == holder.incarnation
    await mesh.kill(holder)
    await mesh.until(lambda: router.gauge("kvmesh_router_num_instances", kind="prefill_worker") == 1)
    before = decided(router, "local")
    other = await place(gateway, "after", 120, names)
    assert other.prefill in {worker.incarnation for worker in workers} - {holder.incarnation}
    assert decided(router, "local") == before
    await mesh.until(lambda: router.gauge("kvmesh_router_kv_snapshots_total", result="taken") >= 3)
    assert router.gauge("kvmesh_router_forgotten_blocks_total") == 0
    # What the store has is known still; whether fetching it pays is for the costs to say.
    await mesh.until(lambda: router.gauge("kvmesh_router_num_known_blocks") >= 30)


async def test_what_was_computed_before_the_router_came_is_known_to_it(mesh: WorkersMesh) -> None:
    first, gateway = await mesh.router("router-0"), await mesh.gateway()
    worker = await mesh.prefill()
    await mesh.decode()
    prompt = prompt_of(80)
    await gateway.generate(prompt)
    await mesh.stop(first)
    second = await mesh.router("router-1")
    # Decode holds the same blocks, and either may tell of them first.
    await mesh.until(lambda: second.gauge("kvmesh_router_kv_snapshots_total", result="taken") >= 2)
    assert second.gauge("kvmesh_router_num_known_blocks") >= 20
    await place(gateway, "again", 80, names_of(worker, prompt))
    assert decided(second, "local") == 1
    await mesh.until(lambda: second.gauge("kvmesh_router_num_publishers_behind") == 0)


async def test_a_stranger_prompt_is_recomputed_and_its_time_predicted(mesh: WorkersMesh) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    worker = await mesh.prefill()
    await mesh.decode()
    await place(gateway, "r", 40, names_of(worker, prompt_of(40, seed=3)))
    assert decided(router, "recompute") == 1
    assert router.gauge("kvmesh_router_predicted_ttft_seconds_count") == 1
    assert router.gauge("kvmesh_router_predicted_ttft_seconds_sum") > 0


def num_ready(router: Hosted) -> float:
    return sum(router.gauge("kvmesh_router_num_instances", kind=kind.value) for kind in (PREFILL, DECODE))


class Told:
    """Workers that are only told of, all reporting the same load."""

    def __init__(self, gateway: Gateway, names: Sequence[str], kind: ServiceKind, num_seats: int = 0) -> None:
        self._bus, self._names, self._kind, self._num_seats = gateway.bus, names, kind, num_seats
        self._sequence = 0

    async def tell(self, **figures: object) -> None:
        self._sequence += 1
        for name in self._names:
            presence = Presence(
                kind=self._kind,
                name=name,
                incarnation=name,
                state=ServiceState.READY,
                num_seats=self._num_seats,
            )
            await self._bus.put_presence(name, msgspec.msgpack.encode(presence))
        for _ in range(20):  # presence has its own way to the router
            await asyncio.sleep(0)
        load = WorkerLoad(**{"num_blocks": 1000, "block_size": 16, **figures})  # type: ignore[arg-type]  # kwargs of the tests
        for name in self._names:
            await self._bus.publish(
                LoadReport(kind=self._kind, incarnation=name, sequence=self._sequence, load=load)
            )


async def test_two_routers_without_a_report_in_between_do_not_pile_prompts_up(mesh: WorkersMesh) -> None:
    routers, gateway = [await mesh.router(f"router-{n}") for n in range(2)], await mesh.gateway()
    prefills = Told(gateway, [f"p{n}" for n in range(8)], PREFILL)
    decodes = Told(gateway, [f"d{n}" for n in range(8)], DECODE)
    await prefills.tell()
    await decodes.tell()
    await mesh.until(lambda: all(num_ready(router) == 16 for router in routers))
    answers = await asyncio.gather(*(place(gateway, f"r{n}", 500) for n in range(80)))
    assert all(router.gauge("kvmesh_router_placed_total") > 10 for router in routers)
    for chosen in ([a.prefill for a in answers], [a.decode for a in answers]):
        counts = Counter(chosen)
        assert len(counts) == 8
        assert max(counts.values()) - min(counts.values()) <= 4


async def test_a_request_that_finds_all_seats_taken_waits_for_one_instead_of_being_sent_and_refused(
    mesh: WorkersMesh,
) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    prefills, decodes = Told(gateway, ["p0"], PREFILL, num_seats=2), Told(gateway, ["d0"], DECODE)
    await prefills.tell()
    await decodes.tell()
    asked = [asyncio.create_task(place(gateway, f"r{n}")) for n in range(3)]
    await mesh.until(lambda: router.gauge("kvmesh_num_requests_waiting") == 1)
    # Both are there: the seats are taken in the report as well.
    await prefills.tell(num_running=1, num_waiting=1, recent_request_ids=("r0", "r1"))
    await mesh.until(lambda: sum(task.done() for task in asked) == 2)
    await prefills.tell(num_running=1, recent_request_ids=("r0", "r1"))
    assert await asked[2] == Placed(prefill="p0", decode="d0")


async def test_a_prompt_for_which_only_the_prefill_pool_is_too_small_is_refused_at_once(
    mesh: WorkersMesh,
) -> None:
    await mesh.router()
    gateway = await mesh.gateway()
    prefills, decodes = Told(gateway, ["p0"], PREFILL), Told(gateway, ["d0"], DECODE)
    await prefills.tell(num_blocks=5)
    await decodes.tell()
    message = Place(
        request_id="r", num_tokens=100, max_new_tokens=4, deadline_unix_seconds=time.time() + 20.0
    )
    asked_at = time.monotonic()
    answer = await gateway.bus.request(message, timeout_seconds=20)
    assert isinstance(answer, Refused)
    assert answer.reason.value == "too_long"
    assert time.monotonic() - asked_at < 10.0
