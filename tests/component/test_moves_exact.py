"""Modules move away and home again while sequences run: every token is that of one engine alone."""

import pytest
from moves_scene import moving_mesh

from libs.placement.module import Module, heads_of, whole_layers

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
        streams = await scene.begin(5, 300)
        for _ in range(3):
            away = await scene.away(module)
            assert away.num_kv_bytes > 0
            assert scene.placement.placed[0].module == module
            await scene.back(away.move_id)
        await scene.check(streams)
        await scene.until_nothing_is_left()
