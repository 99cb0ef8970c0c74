"""Workers ordered to change their role, on the in-memory bus: what they answer, finish, and end as."""

import asyncio
import sys
from collections.abc import AsyncIterator

import pytest
from memory_bus import MemoryBus
from moves_scene import MovesScene
from workers_mesh import Hosted, WorkersMesh, prompt_of, running_mesh

from libs.bus.errors import NoResponders
from libs.bus.messages.migration import DenialReason, FlipRole, MoveAccepted, MoveDenied
from libs.bus.messages.presence import ServiceState
from libs.placement.module import whole_layers
from libs.request.outcome import FailureReason


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkersMesh]:
    monkeypatch.setattr(sys, "argv", ["worker", "--dtype", "float32"])
    async with running_mesh() as mesh:
        yield mesh


async def order(mesh: WorkersMesh, worker: Hosted) -> MoveAccepted | MoveDenied:
    bus = MemoryBus(mesh.broker)
    try:
        return await bus.request(FlipRole(), to=worker.incarnation, timeout_seconds=5)
    finally:
        await bus.close()


async def ended(worker: Hosted) -> str:
    """What it lives on as."""
    assert worker.task is not None
    async with asyncio.timeout(20):
        assert await worker.task == 0
    assert worker.stop.successor is not None
    return worker.stop.successor.module


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_an_idle_worker_answers_and_ends_as_the_other_kind(mesh: WorkersMesh, kind: str) -> None:
    worker = await (mesh.prefill() if kind == "prefill" else mesh.decode())
    answer = await order(mesh, worker)
    assert isinstance(answer, MoveAccepted)
    assert worker.incarnation in answer.move_id
    assert await ended(worker) == f"services.{'decode' if kind == 'prefill' else 'prefill'}_worker"
    assert worker.gauge("kvmesh_role_flips_total") == 1
    with pytest.raises(NoResponders):
        await order(mesh, worker)


async def test_a_decode_worker_ends_what_it_has_begun_before_it_becomes_another(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480), **where)
    await stream.until(2)
    assert isinstance(await order(mesh, decode), MoveAccepted)
    await mesh.until(lambda: decode.presence.state is ServiceState.DRAINING)
    assert decode.presence.detail == "becoming a prefill worker"
    again = await order(mesh, decode)
    assert isinstance(again, MoveDenied)
    assert again.reason is DenialReason.DRAINING
    await stream.end()
    assert (len(stream.tokens), stream.failure) == (480, None)
    assert await ended(decode) == "services.prefill_worker"
    assert decode.gauge("kvmesh_role_flips_total") == 1


async def test_a_prefill_worker_runs_the_prompts_it_took_before_it_becomes_another(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    for n in range(4):
        await gateway.begin(gateway.generation(prompt_of(90, seed=n)), **where)
    assert isinstance(await order(mesh, prefill), MoveAccepted)
    assert await ended(prefill) == "services.decode_worker"
    assert prefill.gauge("kvmesh_prompt_tokens_total") == 4 * 90
    for reason in FailureReason:
        assert prefill.gauge("kvmesh_requests_failed_total", reason=reason.value) == 0
    await mesh.until(lambda: all(stream.ended.is_set() for stream in gateway.streams.values()))


async def test_a_worker_that_was_asked_to_end_is_not_flipped(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480), **where)
    await stream.until(2)
    decode.stop.asked.set()
    await mesh.until(lambda: decode.presence.state is ServiceState.DRAINING)
    denied = await order(mesh, decode)
    assert isinstance(denied, MoveDenied)
    assert denied.reason is DenialReason.DRAINING
    await mesh.stop(decode)
    assert decode.stop.successor is None


async def test_a_worker_of_both_roles_says_why_it_stays_and_goes_on_serving(mesh: WorkersMesh) -> None:
    gateway, decode = await mesh.gateway(), await mesh.decode(role="both")
    denied = await order(mesh, decode)
    assert isinstance(denied, MoveDenied)
    assert denied.reason is DenialReason.INVALID
    stream = await gateway.generate(prompt_of(20), prefill="", decode=decode.incarnation)
    assert len(stream.tokens) == 8
    assert decode.gauge("kvmesh_role_flips_total") == 0


@pytest.mark.parametrize("asked", ["home", "host"])
async def test_a_worker_with_modules_elsewhere_or_of_others_stays_what_it_is_until_they_are_home(
    mesh: WorkersMesh, asked: str
) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    scene = MovesScene(mesh, gateway, prefill, decode)
    await scene.open()
    await mesh.until(lambda: decode.presence in prefill.service._roster.all())
    away = await scene.away(whole_layers(0, 1))
    worker = scene.home if asked == "home" else scene.host
    denied = await order(mesh, worker)
    assert isinstance(denied, MoveDenied)
    assert denied.reason is DenialReason.BUSY
    assert ("1 of its modules are away" if asked == "home" else "hosts 1 modules") in denied.detail
    await scene.back(away.move_id)
    await mesh.until(lambda: worker.gauge("kvmesh_hosted_modules") == 0)
    assert isinstance(await order(mesh, worker), MoveAccepted)
    await ended(worker)
    await scene.bus.close()
