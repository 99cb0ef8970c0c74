"""The router on the bus: two side by side, workers that come and go, questions that are withdrawn."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from workers_mesh import Gateway, WorkersMesh, prompt_of, running_mesh

from libs.bus.errors import BusError
from libs.bus.messages.generation import Place, Placed, Refused, Unplace
from libs.bus.messages.presence import LoadReport, Presence, ServiceKind, ServiceState
from libs.cost.load import WorkerLoad
from libs.request.outcome import RefusalReason


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


class Told:
    """Workers that are only told of: presence and reports, no process."""

    def __init__(self, gateway: Gateway) -> None:
        self._bus, self._sequence = gateway.bus, 0

    async def tell(
        self, name: str, kind: ServiceKind, state: ServiceState = ServiceState.READY, **load: int
    ) -> None:
        self._sequence += 1
        presence = Presence(kind=kind, name=name, incarnation=name, state=state)
        await self._bus.put_presence(name, msgspec.msgpack.encode(presence))
        figures = WorkerLoad(**{"num_blocks": 10, "block_size": 16, **load})
        # The router takes reports of those it knows: presence has its own way there.
        for _ in range(20):
            await asyncio.sleep(0)
        await self._bus.publish(
            LoadReport(kind=kind, incarnation=name, sequence=self._sequence, load=figures)
        )

    async def pair(self, **load: int) -> None:
        await self.tell("p", ServiceKind.PREFILL_WORKER)
        await self.tell("d", ServiceKind.DECODE_WORKER, **load)


def place(request_id: str, num_tokens: int = 15, seconds: float = 20.0) -> Place:
    return Place(
        request_id=request_id,
        num_tokens=num_tokens,
        max_new_tokens=4,
        deadline_unix_seconds=time.time() + seconds,
    )


def ask(gateway: Gateway, message: Place) -> "asyncio.Task[Placed | Refused]":
    return asyncio.create_task(gateway.bus.request(message, timeout_seconds=20))


async def test_a_request_waits_for_the_first_pair_and_is_placed_when_it_comes(mesh: WorkersMesh) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    asking = ask(gateway, place("r"))
    await mesh.until(lambda: router.gauge("kvmesh_num_requests_waiting") == 1)
    await Told(gateway).pair()
    assert await asking == Placed(prefill="p", decode="d")
    assert router.gauge("kvmesh_num_requests_waiting") == 0


async def test_without_workers_the_refusal_comes_after_the_grace(mesh: WorkersMesh) -> None:
    await mesh.router(no_workers_grace_seconds=0.2)
    gateway = await mesh.gateway()
    answer = await ask(gateway, place("r"))
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.NO_WORKERS


async def test_a_deadline_that_passes_in_the_queue_is_answered_then(mesh: WorkersMesh) -> None:
    await mesh.router()
    gateway = await mesh.gateway()
    asked_at = time.time()
    answer = await ask(gateway, place("r", seconds=0.3))
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.DEADLINE
    assert 0.25 < time.time() - asked_at < 10


async def test_room_that_a_report_or_a_withdrawal_frees_goes_to_those_who_wait_in_order(
    mesh: WorkersMesh,
) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    told = Told(gateway)
    await told.pair(num_used_blocks=9)
    asked = [ask(gateway, place(f"r{n}", num_tokens=30)) for n in range(3)]
    await mesh.until(lambda: router.gauge("kvmesh_num_requests_waiting") == 3)
    await told.pair(num_used_blocks=8)
    assert isinstance(await asked[0], Placed)
    assert router.gauge("kvmesh_num_requests_waiting") == 2
    await gateway.bus.publish(Unplace(request_id="r1"))
    assert isinstance(await asked[1], Refused)
    await gateway.bus.publish(Unplace(request_id="r0"))
    assert isinstance(await asked[2], Placed)


async def test_an_asker_that_gives_up_leaves_the_queue(mesh: WorkersMesh) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    with pytest.raises(BusError):
        await gateway.bus.request(place("r"), timeout_seconds=0.1)
    await gateway.bus.publish(Unplace(request_id="r"))
    await mesh.until(lambda: router.gauge("kvmesh_num_requests_waiting") == 0)


async def test_two_routers_share_the_questions_and_one_that_drains_hands_over(mesh: WorkersMesh) -> None:
    first, second = await mesh.router("router-0"), await mesh.router("router-1")
    gateway = await mesh.gateway()
    await Told(gateway).pair(num_blocks=1000)
    answers = await asyncio.gather(*(ask(gateway, place(f"r{n}")) for n in range(40)))
    assert all(isinstance(answer, Placed) for answer in answers)
    assert first.gauge("kvmesh_router_placed_total") > 0
    assert second.gauge("kvmesh_router_placed_total") > 0
    assert await mesh.stop(first) == 0
    assert isinstance(await ask(gateway, place("last")), Placed)


async def test_a_router_that_drains_refuses_those_who_wait_with_it(mesh: WorkersMesh) -> None:
    router, gateway = await mesh.router(), await mesh.gateway()
    asking = ask(gateway, place("r"))
    await mesh.until(lambda: router.gauge("kvmesh_num_requests_waiting") == 1)
    assert await mesh.stop(router) == 0
    answer = await asking
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.DRAINING


async def test_a_dead_worker_is_not_placed_on_after_three_seconds_and_its_successor_is(
    mesh: WorkersMesh,
) -> None:
    await mesh.router()
    gateway = await mesh.gateway()
    await mesh.prefill()
    dead, alive = await mesh.decode("decode-0"), await mesh.decode("decode-1")
    killed_at = time.monotonic()
    await mesh.kill(dead)
    while (placed := await ask(gateway, place(f"r{time.monotonic()}"))) and isinstance(placed, Placed):
        if time.monotonic() - killed_at > 3.5:
            break
        await asyncio.sleep(0.1)
    answers = [await ask(gateway, place(f"s{n}")) for n in range(6)]
    assert {answer.decode for answer in answers if isinstance(answer, Placed)} == {alive.incarnation}
    successor = await mesh.decode("decode-0")
    streams = [await gateway.generate(prompt_of(9, seed=n)) for n in range(4)]
    assert successor.incarnation in {stream.decode for stream in streams}
