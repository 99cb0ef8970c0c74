"""A home tells how many blocks its pool has together with its placement: the two always belong together."""

from collections import defaultdict

from moves_scene import MovesScene, moving_mesh

from libs.bus.messages.migration import PlacementUpdate
from libs.placement.module import heads_of, whole_layers


class Told:
    """The blocks of each epoch of one worker, as they were told."""

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self.blocks: dict[int, list[int]] = defaultdict(list)

    def hear(self, told: PlacementUpdate) -> None:
        if told.placement.owner == self._incarnation:
            self.blocks[told.placement.epoch].append(told.num_blocks)


NOT_COUNTED = 0


async def listen(scene: MovesScene, incarnation: str) -> Told:
    told = Told(incarnation)
    await scene.bus.subscribe(PlacementUpdate, told.hear)
    return told


async def test_at_every_epoch_the_blocks_told_are_those_of_its_placement() -> None:
    async with moving_mesh(host={"num_blocks": 1000}) as scene:
        told = await listen(scene, scene.home.incarnation)
        streams = await scene.begin(3, 200)
        expected = {0: 256}
        for _ in range(2):
            for module in (heads_of(0, 3, (1,)), whole_layers(1, 3)):
                away = await scene.away(module)
                back = await scene.back(away.move_id)
                expected |= {one.epoch: one.num_blocks_after for one in (away, back)}
        await scene.mesh.until(lambda: set(expected) <= set(told.blocks))
        assert {epoch: set(blocks) for epoch, blocks in told.blocks.items()} == {
            epoch: {num_blocks} for epoch, num_blocks in expected.items()
        }
        assert expected[1] > 256
        await scene.check(streams)


async def test_a_lost_host_is_told_at_once_and_its_blocks_as_soon_as_they_are_counted() -> None:
    async with moving_mesh(host={"num_blocks": 1000}) as scene:
        told = await listen(scene, scene.home.incarnation)
        streams = await scene.begin(3, 200)
        away = await scene.away(heads_of(0, 3, (1,)))
        await scene.mesh.kill(scene.host)
        await scene.mesh.until(lambda: 256 in told.blocks.get(2, ()))
        assert {epoch: set(blocks) - {NOT_COUNTED} for epoch, blocks in told.blocks.items()} == {
            0: {256},
            1: {away.num_blocks_after},
            2: {256},
        }
        await scene.check(streams)


async def test_what_guests_take_is_told_without_a_new_epoch() -> None:
    async with moving_mesh(host={"num_blocks": 300}) as scene:
        told = await listen(scene, scene.host.incarnation)
        away = await scene.away(whole_layers(0, 1))
        await scene.mesh.until(lambda: told.blocks[0][-1:] == [scene.host.gauge("kvmesh_num_blocks")])
        assert told.blocks[0][-1] < 300
        await scene.back(away.move_id)
        await scene.mesh.until(lambda: told.blocks[0][-1] == 300)
        assert list(told.blocks) == [0]
