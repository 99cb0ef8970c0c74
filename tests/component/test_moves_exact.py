"""Modules move away and home again while sequences run: every token is that of one engine alone."""

import gc
import weakref

import pytest
from moves_scene import MovesScene, moving_mesh
from workers_mesh import prompt_of

from libs.model.model import Model
from libs.placement.module import Module, heads_of, whole_layers
from libs.worker.migration.owner import remote_host

MODULES = {
    "first layers": whole_layers(0, 2),
    "a layer in the middle": whole_layers(1, 2),
    "last layers": whole_layers(1, 3),
    "heads": heads_of(0, 3, (1,)),
    "heads of one layer": heads_of(1, 2, (0,)),
}


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
async def test_every_token_is_that_of_an_instance_that_stayed(module: Module) -> None:
    async with moving_mesh() as scene:
        streams = await scene.begin(5, 200)
        for _ in range(2):
            away = await scene.away(module)
            assert away.num_kv_bytes > 0
            assert scene.placement.placed[0].module == module
            await scene.back(away.move_id)
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_weights_travel_and_come_back_and_their_memory_makes_blocks() -> None:
    async with moving_mesh(host={"num_blocks": 1500}) as scene:
        streams = await scene.begin(4, 250)
        plain = await scene.away(whole_layers(1, 3))
        await scene.back(plain.move_id)
        for _ in range(2):
            away = await scene.away(whole_layers(1, 3), with_weights=True)
            assert away.num_weight_bytes > 0 == plain.num_weight_bytes
            assert away.num_blocks_after > plain.num_blocks_after
            back = await scene.back(away.move_id)
            assert back.num_blocks_after == plain.num_blocks_before
        await scene.check(streams)
        await scene.until_nothing_is_left()


async def test_weights_that_travelled_are_read_again_when_their_host_is_lost() -> None:
    async with moving_mesh(host={"num_blocks": 1500}) as scene:
        streams = await scene.begin(4, 200)
        await scene.away(whole_layers(0, 1), with_weights=True)
        await scene.mesh.kill(scene.host)
        await scene.check(streams)
        await scene.until_nothing_is_left()
        assert scene.home.gauge("kvmesh_num_blocks") == 256


async def test_several_modules_of_an_instance_are_away_at_once() -> None:
    async with moving_mesh(host={"num_blocks": 2000}) as scene:
        streams = await scene.begin(4, 300)
        moves = [await scene.away(one) for one in (whole_layers(0, 1), heads_of(1, 3, (0,)))]
        more = await scene.begin(3, 60, num_prompt_tokens=70)
        for move in moves:
            await scene.back(move.move_id)
        await scene.check([*streams, *more])
        await scene.until_nothing_is_left()


async def test_prefill_workers_have_their_modules_hosted_while_they_hand_prompts_over() -> None:
    async with moving_mesh() as scene:
        prefill = await scene.mesh.prefill(name="prefill-0")
        decode = scene.home
        scene.home = prefill
        await scene.mesh.until(lambda: scene.host.presence in prefill.service._roster.all())
        for module in (whole_layers(0, 2), whole_layers(1, 3), heads_of(0, 3, (1,))):
            streams = [
                await scene.gateway.begin(
                    scene.gateway.generation(prompt_of(170, n), max_tokens=8),
                    prefill=prefill.incarnation,
                    decode=decode.incarnation,
                )
                for n in range(3)
            ]
            away = await scene.away(module)
            streams += [
                await scene.gateway.begin(
                    scene.gateway.generation(prompt_of(90, n + 9), max_tokens=8),
                    prefill=prefill.incarnation,
                    decode=decode.incarnation,
                )
                for n in range(3)
            ]
            await scene.back(away.move_id)
            await scene.check(streams)
        await scene.mesh.until(lambda: not prefill.service.engine.migrations.placement.placed)


async def test_workers_that_host_for_each_other_go_on_where_every_call_waits_to_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_host, "MAX_UNSENT_BYTES", 0)
    async with moving_mesh(num_blocks=600) as scene:
        prefill = await scene.mesh.prefill(name="prefill-0")
        one, other = scene.home, scene.host
        for scene.home, scene.host in ((one, other), (other, one)):
            await scene.away(heads_of(0, 3, (1,)), num_blocks=200)
        streams = [
            await scene.gateway.begin(
                scene.gateway.generation(prompt_of(170, n), max_tokens=60),
                prefill=prefill.incarnation,
                decode=(one, other)[n % 2].incarnation,
            )
            for n in range(6)
        ]
        await scene.check(streams)
        assert one.gauge("kvmesh_hosts_lost_total") == other.gauge("kvmesh_hosts_lost_total") == 0


async def test_nobody_holds_weights_that_left() -> None:
    async with moving_mesh(host={"num_blocks": 1500}) as scene:
        model = await _model_of(scene)
        layer = weakref.ref(model.layer(1))
        del model
        away = await scene.away(whole_layers(1, 3), with_weights=True)
        gc.collect()
        assert layer() is None
        await scene.back(away.move_id)
        assert list((await _model_of(scene)).weights.layers) == [0, 1, 2]


async def _model_of(scene: MovesScene) -> Model:
    engine = scene.home.service.engine
    assert engine is not None
    return await engine.migrations.model_here()
