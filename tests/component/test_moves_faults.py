"""A host or a home that dies in any phase of a move: right tokens or one error, and nothing left over."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from moves_scene import HOST_BLOCKS, SECONDS, MovesScene, moving_mesh
from workers_mesh import prompt_of

from libs.bus.messages.migration import MigrationAccepted
from libs.placement.migration import MigrationPhase
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers
from libs.request.outcome import FailureReason

SLOW = 0.2
"""MiB per second: a move takes a while."""
PHASES = [
    MigrationPhase.RESERVING,
    MigrationPhase.COPYING,
    MigrationPhase.CATCHING_UP,
    MigrationPhase.SWITCHING,
    MigrationPhase.RELEASING,
    MigrationPhase.DONE,
]
MODULES = {"layers": whole_layers(1, 3), "heads": heads_of(0, 3, (1,))}
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"module": module} for name, module in MODULES.items()},
    "weights": {"module": whole_layers(1, 3), "with_weights": True},
}
in_each_phase = pytest.mark.parametrize(
    ("phase", "kind"),
    [(phase, list(KINDS.values())[number % len(KINDS)]) for number, phase in enumerate(PHASES)],
    ids=[f"{phase.value}-{list(KINDS)[number % len(KINDS)]}" for number, phase in enumerate(PHASES)],
)
both_ways = pytest.mark.parametrize("comes_home", [False, True], ids=["away", "home-again"])


async def lose_links(scene: MovesScene) -> None:
    scene.mesh.network.drop_links()


async def kill_host(scene: MovesScene) -> None:
    await scene.mesh.kill(scene.host)


@pytest.mark.parametrize("lose", [lose_links, kill_host])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
async def test_a_host_that_is_lost_costs_time_and_no_token(
    module: Module, phase: MigrationPhase, lose: Callable[[MovesScene], Awaitable[None]]
) -> None:
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        streams = await scene.begin(4, 120)
        started = await scene.start(module)
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, phase)
        await lose(scene)
        record = await scene.end(started.move_id)
        assert scene.host.incarnation not in record.error
        await scene.check(streams)
        await scene.bring_home()  # lost before it was connected to, it was connected to again
        await scene.until_nothing_is_left()
        assert scene.home.gauge("kvmesh_num_blocks") == 256


@in_each_phase
async def test_a_host_that_is_lost_on_the_way_back_costs_time_and_no_token(
    kind: dict[str, Any], phase: MigrationPhase
) -> None:
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        streams = await scene.begin(4, 200)
        away = await scene.away(**kind)
        started = await scene.start(returned_move_id=away.move_id)
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, phase)
        await kill_host(scene)
        await scene.end(started.move_id)
        await scene.check(streams)
        await scene.until_nothing_is_left()


@both_ways
@in_each_phase
async def test_a_home_that_dies_leaves_nothing_at_its_host(
    kind: dict[str, Any], phase: MigrationPhase, comes_home: bool
) -> None:
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        await scene.begin(4, 400)
        order = {"returned_move_id": (await scene.away(**kind)).move_id} if comes_home else kind
        started = await scene.start(**order)
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, phase)
        await scene.mesh.kill(scene.home)
        host = scene.host
        await scene.mesh.until(lambda: host.gauge("kvmesh_hosted_modules") == 0)
        await scene.mesh.until(lambda: host.gauge("kvmesh_hosted_bytes") == 0)
        assert host.gauge("kvmesh_num_blocks") == HOST_BLOCKS
        stream = await scene.gateway.generate([1, 2, 3], decode=host.incarnation, max_tokens=5)
        assert len(stream.tokens) == 5


@both_ways
@in_each_phase
async def test_a_broker_that_dies_stops_no_move_and_no_stream(
    kind: dict[str, Any], phase: MigrationPhase, comes_home: bool
) -> None:
    """Nobody but the two workers is needed once a move has begun: neither broker nor coordinator."""
    async with moving_mesh(move_bandwidth_mib=SLOW) as scene:
        streams = await scene.begin(4, 200)
        order = {"returned_move_id": (await scene.away(**kind)).move_id} if comes_home else kind
        started = await scene.start(**order)
        assert isinstance(started, MigrationAccepted)
        await scene.until(started.move_id, phase)
        scene.mesh.broker.stop()
        await scene.mesh.until(lambda: bool(scene.placement.placed) is not comes_home)
        scene.mesh.broker.start()
        await scene.check(streams)
        async with asyncio.timeout(SECONDS):
            while scene.placement.placed:  # the move may not have released yet
                await scene.bring_home()
        await scene.until_nothing_is_left()


async def test_a_home_that_falls_silent_loses_its_modules_when_its_lease_ends() -> None:
    async with moving_mesh(host={"lease_seconds": 1.0}, lease_seconds=60.0) as scene:
        streams = await scene.begin(3, 400)
        await scene.away(whole_layers(0, 1))
        await scene.mesh.until(lambda: scene.host.gauge("kvmesh_hosted_modules") == 0)
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_a_host_that_does_not_answer_is_lost_after_a_while() -> None:
    async with moving_mesh(hosting_timeout_seconds=1.0) as scene:
        streams = await scene.begin(3, 300)
        await scene.away(whole_layers(0, 1))
        scene.host.service.engine.hosting.call = lambda guest, call, answer: None
        await scene.mesh.until(lambda: not scene.placement.placed)
        assert scene.home.gauge("kvmesh_hosts_lost_total") == 1
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_lost_lent_blocks_cost_time_and_no_token() -> None:
    async with moving_mesh(num_blocks=140) as scene:
        streams = await scene.begin(6, 200)
        await scene.away(remote_blocks(3), num_blocks=60)
        more = await scene.begin(6, 120, num_prompt_tokens=40)
        await kill_host(scene)
        await scene.check([*streams, *more])
        await scene.until_nothing_is_left()
        assert scene.home.gauge("kvmesh_num_blocks") == 140


async def test_two_workers_that_host_for_each_other_go_on() -> None:
    async with moving_mesh(num_blocks=600, host={"num_blocks": 600}) as scene:
        there = MovesScene(scene.mesh, scene.gateway, scene.host, scene.home)
        await there.open()
        streams = [*await scene.begin(4, 150), *await there.begin(4, 150)]
        for module in MODULES.values():
            away, other = await asyncio.gather(
                scene.away(module, move_id=f"a-{module.kind.value}"),
                there.away(module, move_id=f"b-{module.kind.value}"),
            )
            await asyncio.gather(
                scene.back(away.move_id), there.back(other.move_id, move_id=f"c-{other.move_id}")
            )
        await scene.check(streams)
        await scene.until_nothing_is_left()
        await there.bus.close()


async def test_a_host_whose_way_to_the_broker_is_cut_goes_on_hosting() -> None:
    async with moving_mesh() as scene:
        await scene.away(whole_layers(0, 1))
        scene.host.bus.disconnect()
        roster = scene.home.service._roster
        await scene.mesh.until(lambda: roster.get(scene.host.incarnation) is None)
        await scene.check(await scene.begin(3, 60))
        assert len(scene.placement.placed) == 1
        scene.host.bus.reconnect()


async def test_a_host_that_left_the_mesh_and_answers_nothing_is_lost() -> None:
    async with moving_mesh() as scene:
        await scene.away(whole_layers(0, 1))
        scene.host.bus.disconnect()
        scene.mesh.network.freeze()
        await scene.mesh.until(lambda: not scene.placement.placed)
        scene.mesh.network.thaw()
        await scene.check(await scene.begin(3, 30))


async def test_prompts_that_are_handed_over_fail_or_are_right_when_the_host_of_their_layers_dies() -> None:
    async with moving_mesh() as scene:
        prefill, decode = await scene.mesh.prefill(), scene.home
        scene.home = prefill
        await scene.mesh.until(lambda: scene.host.presence in prefill.service._roster.all())
        await scene.away(whole_layers(0, 2))
        streams = [
            await scene.gateway.begin(
                scene.gateway.generation(prompt_of(190, n), max_tokens=8),
                prefill=prefill.incarnation,
                decode=decode.incarnation,
            )
            for n in range(4)
        ]
        await scene.mesh.kill(scene.host)
        ended = [await stream.end() for stream in streams]
        assert {one.failure for one in ended} <= {None, FailureReason.PEER_LOST}
        await scene.check([one for one in ended if one.failure is None])
        again = await scene.gateway.generate(
            prompt_of(40), prefill=prefill.incarnation, decode=decode.incarnation
        )
        await scene.check([again])
        await scene.mesh.until(lambda: not scene.placement.placed)
