"""Workers change their role in place, on the in-memory bus: what they answer, finish, and do from then on."""

import time
from collections.abc import AsyncIterator

import pytest
from memory_bus import MemoryBus
from moves_scene import MovesScene
from workers_mesh import Gateway, Hosted, WorkersMesh, prompt_of, running_mesh
from workers_reference import Reference

from libs.bus.messages.generation import Abort, Queued, Refused
from libs.bus.messages.migration import ChangeRole, DenialReason, MigrationDenied, RoleAccepted
from libs.bus.messages.presence import ServiceKind, ServiceState
from libs.placement.module import whole_layers
from libs.placement.role import Role
from libs.request.outcome import RefusalReason

PAIRS = [(first, then) for first in Role for then in Role if first is not then]


@pytest.fixture
async def mesh() -> AsyncIterator[WorkersMesh]:
    async with running_mesh() as mesh:
        yield mesh


async def order(mesh: WorkersMesh, worker: Hosted, role: Role) -> RoleAccepted | MigrationDenied:
    bus = MemoryBus(mesh.broker)
    try:
        return await bus.request(ChangeRole(role=role), to=worker.incarnation, timeout_seconds=5)
    finally:
        await bus.close()


async def change(mesh: WorkersMesh, worker: Hosted, role: Role) -> None:
    assert await order(mesh, worker, role) == RoleAccepted(role=role)
    await mesh.until(lambda: worker.presence.state is ServiceState.READY and role_of(worker) is role)


def role_of(worker: Hosted) -> Role:
    """As its presence tells."""
    if worker.presence.kind is ServiceKind.PREFILL_WORKER:
        return Role.PREFILL
    return Role.BOTH if worker.presence.runs_prompts else Role.DECODE


async def worker_in(mesh: WorkersMesh, role: Role, name: str = "worker") -> Hosted:
    make = mesh.prefill if role is Role.PREFILL else mesh.decode
    return await make(name, role=role.value)


async def check_serves(mesh: WorkersMesh, gateway: Gateway, worker: Hosted, role: Role) -> None:
    """Requests of its role are answered rightly, others are refused."""
    other = mesh.hosted["decode-0" if role is Role.PREFILL else "prefill-0"]
    prefill, decode = {
        Role.PREFILL: (worker.incarnation, other.incarnation),
        Role.DECODE: (other.incarnation, worker.incarnation),
        Role.BOTH: ("", worker.incarnation),
    }[role]
    generation = gateway.generation(prompt_of(70, seed=gateway.num_asked))
    stream = await (await gateway.begin(generation, prefill=prefill, decode=decode)).end()
    async with Reference() as reference:
        assert stream.tokens == [token.token_id for token in await reference.tokens(generation)]
    for asked in (other.incarnation, ""):
        held = gateway.generation(prompt_of(9))
        answer = await gateway.reserve(held, worker.incarnation, asked)
        is_served = role is Role.BOTH or (role is Role.DECODE and asked != "")
        assert is_served or (isinstance(answer, Refused) and answer.reason is RefusalReason.NO_WORKERS)
        await gateway.bus.publish(Abort(request_id=held.request_id), to=worker.incarnation)
    handed = gateway.generation(prompt_of(9))
    queued = await gateway.prefill(handed, other.incarnation, worker.incarnation, other.presence.link_address)
    assert isinstance(queued, Queued if role is not Role.DECODE else Refused)
    await gateway.bus.publish(Abort(request_id=handed.request_id), to=worker.incarnation)
    await mesh.until_idle()


@pytest.mark.parametrize(("first", "then"), PAIRS)
async def test_a_worker_serves_in_its_new_role_and_again_in_the_old_one(
    mesh: WorkersMesh, first: Role, then: Role
) -> None:
    gateway = await mesh.gateway()
    await mesh.prefill(), await mesh.decode()
    worker = await worker_in(mesh, first)
    engine, incarnation = worker.service.engine, worker.presence.incarnation
    for num_changes, role in enumerate((then, first), start=1):
        await change(mesh, worker, role)
        assert (worker.presence.link_address != "") is (role is not Role.PREFILL)
        assert worker.gauge("kvmesh_role_flips_total") == num_changes
        info = {"name": "worker", "incarnation": incarnation, "service": worker.presence.kind.value}
        assert any(
            info.items() <= sample.labels.items()
            for family in worker.registry.collect()
            for sample in family.samples
            if sample.name == "kvmesh_service_info"
        )
        await check_serves(mesh, gateway, worker, role)
    assert (worker.service.engine, worker.presence.incarnation) == (engine, incarnation)


async def test_a_decode_worker_ends_what_it_has_begun_and_refuses_the_rest_meanwhile(
    mesh: WorkersMesh,
) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480), **where)
    await stream.until(2)
    assert isinstance(await order(mesh, decode, Role.PREFILL), RoleAccepted)
    await mesh.until(lambda: decode.presence.state is ServiceState.DRAINING)
    assert decode.presence.detail == "changing its role to prefill"
    assert decode.presence.kind is ServiceKind.DECODE_WORKER, "until its work has ended"
    refused = await gateway.reserve(gateway.generation(prompt_of(9)), decode.incarnation, prefill.incarnation)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DRAINING
    assert isinstance(await order(mesh, decode, Role.PREFILL), RoleAccepted), "asked twice, done once"
    denied = await order(mesh, decode, Role.BOTH)
    assert isinstance(denied, MigrationDenied)
    assert denied.reason is DenialReason.BUSY
    await stream.end()
    ended_at = time.monotonic()
    await mesh.until(lambda: decode.presence.state is ServiceState.READY)
    assert time.monotonic() - ended_at < 1
    assert role_of(decode) is Role.PREFILL
    assert (len(stream.tokens), stream.failure) == (480, None)
    assert decode.gauge("kvmesh_role_flips_total") == 1


async def test_a_prefill_worker_hands_over_the_prompts_it_took_before_it_changes(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    for n in range(4):
        await gateway.begin(gateway.generation(prompt_of(90, seed=n)), **where)
    await change(mesh, prefill, Role.BOTH)
    assert prefill.gauge("kvmesh_prompt_tokens_total") == 4 * 90
    for stream in gateway.streams.values():
        assert (await stream.end()).failure is None


async def test_a_worker_that_has_the_role_already_goes_on(mesh: WorkersMesh) -> None:
    decode = await mesh.decode()
    assert await order(mesh, decode, Role.DECODE) == RoleAccepted(role=Role.DECODE)
    assert decode.presence.state is ServiceState.READY
    assert decode.gauge("kvmesh_role_flips_total") == 0


async def test_a_worker_that_was_asked_to_end_keeps_its_role(mesh: WorkersMesh) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480), **where)
    await stream.until(2)
    decode.stop.asked.set()
    await mesh.until(lambda: decode.presence.state is ServiceState.DRAINING)
    denied = await order(mesh, decode, Role.PREFILL)
    assert isinstance(denied, MigrationDenied)
    assert denied.reason is DenialReason.DRAINING
    assert await mesh.stop(decode) == 0
    assert len(stream.tokens) == 480


async def test_a_worker_that_is_asked_to_end_while_it_changes_ends_its_work_and_changes_no_more(
    mesh: WorkersMesh,
) -> None:
    gateway, prefill, decode = await mesh.gateway(), await mesh.prefill(), await mesh.decode()
    where = {"prefill": prefill.incarnation, "decode": decode.incarnation}
    stream = await gateway.begin(gateway.generation(prompt_of(20), max_tokens=480), **where)
    await stream.until(2)
    assert isinstance(await order(mesh, decode, Role.PREFILL), RoleAccepted)
    assert await mesh.stop(decode) == 0
    assert len(stream.tokens) == 480
    assert role_of(decode) is Role.DECODE


async def test_a_worker_that_is_still_starting_is_not_ready_to_change(mesh: WorkersMesh) -> None:
    worker = await mesh.decode()
    runtime = worker.runtime
    assert runtime is not None
    runtime.become(ServiceState.STARTING, "loading weights 40%")
    denied = await order(mesh, worker, Role.PREFILL)
    assert isinstance(denied, MigrationDenied)
    assert denied.reason is DenialReason.NOT_READY
    assert "loading weights 40%" in denied.detail
    runtime.become(ServiceState.READY)


@pytest.mark.parametrize("asked", ["home", "host"])
async def test_modules_stay_where_they_are(mesh: WorkersMesh, asked: str) -> None:
    gateway = await mesh.gateway()
    home, host = (
        await mesh.decode("home", role="both"),
        await mesh.decode("host", role="both", num_blocks=600),
    )
    scene = MovesScene(mesh, gateway, home, host)
    await scene.open()
    await mesh.until(lambda: host.presence in home.service._roster.all())
    away = await scene.away(whole_layers(0, 1))
    worker = scene.home if asked == "home" else scene.host
    await change(mesh, worker, Role.PREFILL)
    assert host.gauge("kvmesh_hosted_modules") == 1
    await change(mesh, worker, Role.BOTH)
    await scene.check(await scene.begin(2, 30))
    assert host.gauge("kvmesh_hosted_modules") == 1
    await scene.back(away.move_id)
    await mesh.until(lambda: host.gauge("kvmesh_hosted_modules") == 0)
    await scene.bus.close()
