"""Workers that end at the same time while modules are away: nobody waits for who waits for it."""

import asyncio
from typing import Any

import pytest
from moves_scene import MovesScene, moving_mesh
from workers_gateway import Stream
from workers_mesh import Hosted, prompt_of

from libs.engine.errors import MoveRefused
from libs.placement.migration import MigrationPhase
from libs.placement.module import Module, heads_of, remote_blocks, whole_layers

SECONDS = 15.0
DRAIN: dict[str, Any] = {"drain_timeout_seconds": 60.0}
"""Far more than SECONDS: who waits until its drain is cut short is seen, also on a busy machine."""
MODULES = {
    "layers": (whole_layers(0, 2), {}),
    "layers-with-weights": (whole_layers(0, 2), {"with_weights": True}),
    "heads": (heads_of(0, 3, (1,)), {}),
    "lent": (remote_blocks(3), {"num_blocks": 60}),
}
away_modules = pytest.mark.parametrize(("module", "facts"), MODULES.values(), ids=MODULES)
running = pytest.mark.parametrize("num_sequences", [0, 3], ids=["idle", "running"])


async def end_at_once(scene: MovesScene, *workers: Hosted) -> None:
    """All are asked to end in this order; nobody ends late, or by force, or loses a host."""
    async with asyncio.timeout(SECONDS):
        codes = await asyncio.gather(*(scene.mesh.stop(one) for one in workers))
    assert codes == [0] * len(workers)
    assert [one.gauge("kvmesh_hosts_lost_total") for one in workers] == [0] * len(workers)
    assert [one.gauge("kvmesh_hosted_modules") for one in workers] == [0] * len(workers)


@pytest.mark.parametrize("is_host_first", [False, True], ids=["home-first", "host-first"])
@running
@away_modules
async def test_a_home_and_its_host_end_at_once(
    module: Module, facts: dict[str, Any], num_sequences: int, is_host_first: bool
) -> None:
    async with moving_mesh(**DRAIN, host=DRAIN) as scene:
        streams = await scene.begin(num_sequences, 80)
        await scene.away(module, **facts)
        pair = (scene.host, scene.home) if is_host_first else (scene.home, scene.host)
        await end_at_once(scene, *pair)
        await scene.check(streams)


@running
@away_modules
async def test_two_workers_that_host_for_each_other_end_at_once(
    module: Module, facts: dict[str, Any], num_sequences: int
) -> None:
    async with moving_mesh(**DRAIN, num_blocks=600, host={**DRAIN, "num_blocks": 600}) as scene:
        there = await seen_from(scene, scene.host, scene.home)
        streams = [*await scene.begin(num_sequences, 80), *await there.begin(num_sequences, 80)]
        await scene.away(module, **facts)
        await there.away(module, **facts, move_id="there")
        await end_at_once(scene, scene.home, scene.host)
        await scene.check(streams)
        await there.bus.close()


@running
async def test_three_workers_of_which_each_hosts_for_the_next_end_at_once(num_sequences: int) -> None:
    async with moving_mesh(**DRAIN, num_blocks=600, host={**DRAIN, "num_blocks": 600}) as scene:
        third = await scene.mesh.decode("decode-2", role="both", **DRAIN, num_blocks=600)
        ring = [scene, await seen_from(scene, scene.host, third), await seen_from(scene, third, scene.home)]
        streams = list[Stream]()
        for number, one in enumerate(ring):
            streams += await one.begin(num_sequences, 60)
            await one.away(whole_layers(number, number + 1), move_id=f"ring-{number}")
        await end_at_once(scene, *(one.home for one in ring))
        await scene.check(streams)
        for one in ring[1:]:
            await one.bus.close()


async def test_a_prefill_worker_and_a_decode_worker_that_host_for_each_other_end_their_work_first() -> None:
    async with moving_mesh(**DRAIN, num_blocks=600) as scene:
        prefill, decode = await scene.mesh.prefill(**DRAIN, num_blocks=600), scene.home
        prompts = await seen_from(scene, prefill, decode)
        await scene.mesh.until(lambda: prefill.presence in decode.service._roster.all())
        await scene.away(whole_layers(0, 1), host=prefill.incarnation)
        await prompts.away(whole_layers(1, 2), move_id="there")
        generations = [scene.gateway.generation(prompt_of(90, n), max_tokens=20) for n in range(3)]
        streams = [
            await scene.gateway.begin(one, prefill=prefill.incarnation, decode=decode.incarnation)
            for one in generations
        ]
        await end_at_once(scene, prefill, decode)
        await scene.check(streams)
        await prompts.bus.close()


async def test_a_home_that_ends_gives_up_what_it_takes_back_from_a_host_that_leaves() -> None:
    async with moving_mesh(**DRAIN, host=DRAIN, move_bandwidth_mib=0.02) as scene:
        await scene.away(heads_of(0, 3, (1,)))
        streams = await scene.begin(3, 250)
        stopping = asyncio.ensure_future(scene.mesh.stop(scene.host))
        await scene.mesh.until(lambda: any("leave-" in move_id for move_id in scene.told))
        (returning,) = (move_id for move_id in scene.told if "leave-" in move_id)
        await scene.until(returning, MigrationPhase.COPYING)
        async with asyncio.timeout(SECONDS):
            assert await scene.mesh.stop(scene.home) == 0
            assert await stopping == 0
        assert (await scene.end(returning)).error == "its home is about to end"
        await scene.check(streams)


async def test_a_home_that_waits_for_its_guests_alone_tells_that_it_has_nothing_away() -> None:
    async with moving_mesh(**DRAIN, num_blocks=600, host={"num_blocks": 600}) as scene:
        there = await seen_from(scene, scene.host, scene.home)
        await scene.away(whole_layers(0, 1))
        await there.away(whole_layers(1, 2), move_id="there")
        held = asyncio.Event()
        begin_return = scene.host.service.engine.migrations.begin_return

        async def begin_late(*args: Any, **facts: Any) -> int:
            await held.wait()
            return int(await begin_return(*args, **facts))

        scene.host.service.engine.migrations.begin_return = begin_late
        stopping = asyncio.ensure_future(scene.mesh.stop(scene.home))
        await scene.mesh.until(lambda: scene.host.gauge("kvmesh_hosted_modules") == 0)
        await scene.mesh.until(lambda: not scene.told_placement(scene.home).placed)
        assert len(scene.placements[scene.home.incarnation].hosted) == 1
        held.set()
        assert await stopping == 0
        assert not there.placement.placed
        await scene.check(await there.begin(2, 10))
        await there.bus.close()


async def test_a_host_does_not_wait_for_an_idle_home_that_cannot_take_its_modules_back() -> None:
    async with moving_mesh(host=DRAIN) as scene:
        await scene.away(whole_layers(0, 2))

        async def refuse(*args: Any, **facts: Any) -> int:
            raise MoveRefused("not now")

        scene.home.service.engine.migrations.begin_return = refuse
        async with asyncio.timeout(SECONDS):
            assert await scene.mesh.stop(scene.host) == 0
        await scene.mesh.until(lambda: not scene.placement.placed)
        assert scene.home.gauge("kvmesh_hosts_lost_total") == 1
        await scene.check(await scene.begin(2, 20))
        await scene.until_nothing_is_left()


async def test_a_host_waits_for_sequences_whose_home_cannot_take_their_modules_back() -> None:
    async with moving_mesh(host=DRAIN) as scene:
        await scene.away(whole_layers(0, 2))
        streams = await scene.begin(3, 100)

        async def refuse(*args: Any, **facts: Any) -> int:
            raise MoveRefused("not now")

        scene.home.service.engine.migrations.begin_return = refuse
        stopping = asyncio.ensure_future(scene.mesh.stop(scene.host))
        await scene.check(streams)
        assert scene.home.gauge("kvmesh_hosts_lost_total") == 0
        async with asyncio.timeout(SECONDS):
            assert await scene.mesh.stop(scene.home) == 0
            assert await stopping == 0


async def seen_from(scene: MovesScene, home: Hosted, host: Hosted) -> MovesScene:
    """The same mesh, to order moves of another home. Its `bus` is the caller's to close."""
    there = MovesScene(scene.mesh, scene.gateway, home, host)
    await there.open()
    await scene.mesh.until(lambda: host.presence in home.service._roster.all())
    return there
